"""Linear layers at the speed of memory: the same sums as `nn.Linear` in every shape, and the same model around them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from kvexp.generate import Decoding, generate
from kvexp.methods import Full
from kvexp.models import install
from kvexp.models.linear import LEAST, MemoryBoundLinear, quicken

HERE = torch.backends.mkldnn.is_available()
SHAPES = [(3,), (1, 1), (2, 1), (1, 2), (1, 3), (5, 7), (0, 1), ()]
OUT, IN = 514, 256


class Subclass(torch.Tensor):
    """As libraries put in place of weights that they quantize."""


def quick(out=OUT, inside=IN, bias=True):
    torch.manual_seed(3)
    layer = nn.Sequential(nn.Linear(inside, out, bias=bias))
    quicken(layer)
    return layer[0]


def routes(layer, x, monkeypatch):
    """The result, and which ways were taken."""
    taken = []
    plain, halves = torch.nn.functional.linear, MemoryBoundLinear._in_halves
    monkeypatch.setattr("kvexp.models.linear.functional.linear", lambda *a: taken.append("linear") or plain(*a))
    monkeypatch.setattr(MemoryBoundLinear, "_in_halves", lambda self, x: taken.append("halves") or halves(self, x))
    result = layer(x)
    monkeypatch.undo()
    return result, taken


def bound(layer, x):
    """What rounding may cost a sum of n products in any order: n * 2**-24 * sum |x| |w|, once more for the bias."""
    weight = layer.weight.detach()
    return (weight.shape[1] + 1) * 2.0**-24 * (linear(x.abs().double(), weight.abs().double()) + 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [OUT, OUT + 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_sums(shape, out, bias, monkeypatch):
    layer = quick(out, bias=bias)
    x = torch.randn(*shape, IN, generator=torch.Generator().manual_seed(len(shape)))
    with torch.no_grad():
        result, taken = routes(layer, x, monkeypatch)
        exact = linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    assert result.shape == exact.shape and result.is_contiguous() and result.dtype == torch.float32
    assert bool(((result - exact).abs() <= bound(layer, x)).all())
    rows = x.numel() // IN
    if HERE:
        assert taken == (["linear"] if not rows else ["halves"] if rows <= 2 and not out % 2 else [])


def test_a_transposed_input():
    layer, x = quick(), torch.randn(IN, 2).t()
    with torch.no_grad():
        assert bool(((layer(x) - linear(x.double(), layer.weight.double(), layer.bias.double())).abs() < 1e-4).all())


def test_what_goes_the_ordinary_way(monkeypatch):
    """Gradients, other dtypes, autocast, weights of another layout or kind, or so small that the call takes longer."""
    x = torch.randn(1, IN)
    result, taken = routes(quick(), x, monkeypatch)
    assert taken == ["linear"]
    result.sum().backward()
    with torch.no_grad():
        assert routes(quick().double(), x.double(), monkeypatch)[1] == ["linear"]
        assert routes(quick().bfloat16(), x.bfloat16(), monkeypatch)[1] == ["linear"]
        with torch.autocast("cpu", torch.bfloat16):
            assert routes(quick(), x, monkeypatch)[1] == ["linear"]
        assert routes(quick(out=LEAST // IN - 1), x, monkeypatch)[1] == ["linear"]
        transposed, other = quick(), quick()
        transposed.weight = nn.Parameter(torch.randn(IN, OUT).t())
        other.weight = nn.Parameter(torch.randn(OUT, IN).as_subclass(Subclass), requires_grad=False)
        assert routes(transposed, x, monkeypatch)[1] == routes(other, x, monkeypatch)[1] == ["linear"]
        assert routes(quick(out=LEAST // IN), x, monkeypatch)[1] == (["halves"] if HERE else ["linear"])


def test_only_plain_linear_layers_change():
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Other(2, 2), nn.Bilinear(2, 2, 2))
    keys = list(model.state_dict())
    quicken(model)
    quicken(model)
    assert [type(part) for part in model] == [MemoryBoundLinear if HERE else nn.Linear, Other, nn.Bilinear]
    assert list(model.state_dict()) == keys


def test_a_model_writes_what_it_wrote():
    """Weights large enough for every way; Hugging Face's own generate() beside, and the stock model stays as it was."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=1031,
        initializer_range=0.1,
    )
    stock = LlamaForCausalLM(config).eval()
    ours = install(copy.deepcopy(stock))
    for rows in (1, 2, 5):
        prompt = torch.randint(0, 1031, (rows, 9), generator=torch.Generator().manual_seed(rows))
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        theirs = stock.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        made = generate(ours, prompt.tolist(), Full(), decoding=Decoding(12, eos=None), keep_logits=True)
        assert torch.equal(made.sequences, theirs)
        with torch.no_grad():
            logits = stock(theirs[:, :-1]).logits[:, 8:]
        torch.testing.assert_close(torch.stack(made.logits, 1), logits, atol=1e-4, rtol=0)
    assert not any(isinstance(module, MemoryBoundLinear) for module in stock.modules())
