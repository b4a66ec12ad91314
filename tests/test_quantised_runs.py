"""Quantised slots from the command line: settings, what identifies a run, labels, rows and tables."""

from __future__ import annotations

from typing import Any

import pytest
from test_conf import composed

from kvexp.build import CACHE, STORAGE, build_cache
from kvexp.config.labels import QUANTISED_FULL
from kvexp.config.model_spec import check_cache_fits_model
from kvexp.config.root_values import check_idle
from kvexp.config.settings import Settings, settings_of
from kvexp.core import Budget, Quantization
from kvexp.errors import ConfigError
from kvexp.evaluate.evaluate_run import evaluate_run
from kvexp.lm_eval.row_mask_protocol import check_row_mask
from kvexp.methods import H2O, Full
from kvexp.record import identity
from kvexp.results.read import folders
from kvexp.results.table import table


def settings(*overrides: str) -> Settings:
    config, choices = composed(*overrides)
    return settings_of(
        config, choices, [word for word in overrides if not word.startswith(("method=", "outputs_dir="))]
    )


def test_the_configurations_defaults_are_the_classs() -> None:
    made = settings("cache.bits=4").cache.quantization
    assert made == Quantization(4, 4)
    config, _ = composed()
    assert {name: config["cache"][name] for name in STORAGE} == STORAGE
    assert set(config["cache"]) == set(CACHE)


def test_bits_of_keys_and_of_values() -> None:
    given = ("cache.bits=4", "cache.value_bits=2", "cache.residual=7", "cache.group=8", "cache.key_axis=token")
    assert settings(*given).cache.quantization == Quantization(4, 2, "token", group=8, residual=7)
    assert settings("cache.key_bits=8").cache.quantization == Quantization(8, 16)
    assert settings("cache.bits=8", "cache.key_bits=16", "cache.value_bits=16").cache.quantization is None


def test_a_run_in_sixteen_bits_is_the_run_it_was() -> None:
    """No hash moves: the new settings are in the identity of quantised runs alone."""
    plain, quantised = settings("method=h2o"), settings("method=h2o", "cache.bits=4")
    assert plain.identity == settings("method=h2o", "cache.bits=16").identity
    assert "quantization" not in plain.identity
    assert quantised.identity == plain.identity | {"quantization": quantised.identity["quantization"]}
    other = settings("method=h2o", "cache.bits=4", "cache.residual=5")
    assert identity(other.identity) != identity(quantised.identity)


def test_a_full_cache_in_few_bits_is_no_baseline() -> None:
    full, coded = settings("method=full", "cache.bits=16"), settings("method=full", "cache.bits=4")
    assert full.is_baseline and not coded.is_baseline
    assert full.identity == coded.baseline().identity and coded.labels["method"] == QUANTISED_FULL
    assert full.labels["method"] == "full" and full.labels["setting"] == ""
    assert coded.labels["setting"] == "cache.bits=4"
    assert identity(full.identity) != identity(coded.identity)


def test_a_folder_of_before_still_makes_its_settings() -> None:
    config, choices = composed()
    config["cache"] = {name: value for name, value in config["cache"].items() if name not in STORAGE}
    assert settings_of(config, choices).cache.quantization is None


def test_rows_and_the_table(tmp_path: Any) -> None:
    given = (
        f"outputs_dir={tmp_path}",
        "task.max_new_tokens=4",
        "task.nll=false",
        "limit=2",
        "cache.group=8",
        "cache.residual=8",
        "kv_ratio=0.5",
    )
    held = {}
    for method, bits in (("full", 16), ("full", 4), ("h2o", 16), ("h2o", 4)):
        run = evaluate_run(settings(*given, f"method={method}", f"cache.bits={bits}"))
        held[method, bits] = [row["receipt"]["kv_bytes"] for row in run.rows()]
    for method in ("full", "h2o"):
        assert all(2 < plain / coded < 4 for plain, coded in zip(held[method, 16], held[method, 4], strict=True))
    found = {(folder.labels["method"], folder.labels["setting"]): folder for folder in folders(tmp_path)}
    assert [folder.labels["method"] for folder in found.values() if folder.is_baseline] == ["full"]
    assert not any(folder.void for folder in found.values())
    frame = table(tmp_path).set_index("method")
    assert set(frame.index) == {"full", QUANTISED_FULL, "h2o"}
    assert frame.loc[QUANTISED_FULL, "kv_bytes"] < frame.loc["full", "kv_bytes"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["cache.bits=3"], "cache.bits must be one of 16, 8, 4, 2, got 3"),
        (["cache.key_bits=5"], "cache.key_bits must be one of 16, 8, 4, 2 or null for cache.bits, got 5"),
        (["cache.bits=4", "cache.group=0"], "cache.group must be a whole number of at least 1, got 0"),
        (["cache.bits=4", "cache.residual=none"], "cache.residual must be a whole number of at least 0, got 'none'"),
        (["cache.bits=4", "cache.key_axis=head"], "cache.key_axis must be one of channel, token, got 'head'"),
        (["cache.bits=4", "cache.mode=mask"], "set cache.mode=overwrite or cache.mode=compact"),
        (["cache.bits=4", "method=ideal"], "as which method ideal exists only"),
        (["cache.bits=4", "method=pqcache"], "cache.key_bits and cache.value_bits below 16 go with methods that evict"),
    ],
)
def test_errors_name_the_keys_as_they_are_typed(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as told:
        settings(*given)
    assert words in str(told.value)


def test_a_group_that_does_not_divide_the_head_is_told_before_a_model_loads() -> None:
    wrong = settings("cache.bits=4")
    with pytest.raises(
        ConfigError, match=r"cache\.group=32 does not divide the 16 channels .* set cache\.group=2 or 4"
    ):
        check_cache_fits_model(wrong.model, wrong.cache)
    fits = settings("cache.bits=4", "cache.group=8")
    check_cache_fits_model(fits.model, fits.cache)


def test_settings_of_codes_without_codes_are_idle() -> None:
    config, choices = composed("cache.residual=5")
    with pytest.raises(
        ConfigError, match=r"cache\.residual has no effect with cache\.bits=16.* leave out cache\.residual=5"
    ):
        check_idle(config, choices, ["cache.residual=5"])
    check_idle(config, choices, ["cache.bits=16", "cache.residual=5"])  # one job of a sweep over bits
    config, choices = composed("cache.residual=5", "cache.key_bits=4")
    check_idle(config, choices, ["cache.residual=5", "cache.key_bits=4"])


def test_a_row_mask_has_no_codes() -> None:
    cache = build_cache(H2O(), Budget(kv_ratio=0.5), {"bits": 4})
    with pytest.raises(ConfigError, match=r"protocol=row_mask .*: set cache\.bits=16"):
        check_row_mask(cache, "local")
    assert build_cache(Full(), None, {}).quantization is None
