"""varlen_attention against float64 truth, under Triton's interpreter without a GPU and on the GPU with one.

The yardstick is every document alone, as transformers computes it eagerly in the inputs' dtype. In 16 bits
the norm of the kernel's error may not exceed that of eager attention. In float32 it may be half as large
again: the kernel rounds logits once more, into units of ln 2. That holds for logits of a few units, as these
are; of larger ones it loses more. In any dtype it may differ by what float32 loses in
out · g_out - g_out · v, where eager attention loses nothing if a query sees one key.
"""

import math
import random
from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from exactness import DEVICE, assert_no_sync, large_buffer
from torch import Tensor

from unsloth_pack.kernels import varlen_attention

pytest.importorskip("triton")
host = import_module("unsloth_pack.kernels.attention")  # whose name the function has taken
TILES, Tile, Tiles = host.TILES, host.Tile, host.Tiles
FP32, BF16 = torch.float32, torch.bfloat16
SMALL = Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))  # many tiles of few tokens
RAGGED = (1, 2, 0, 15, 16, 17, 0, 0, 33, 3, 0)
ALL = {"softcap": 2.0, "window": 7, "sinks": True}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    g_out: Tensor
    lengths: tuple[int, ...]
    options: dict
    sinks: Tensor | None = None
    parents: tuple[int, ...] | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).to(DEVICE, torch.int32)

    @property
    def named(self) -> dict:
        if self.parents is None:
            return self.options
        return self.options | {"parents": torch.tensor(self.parents, dtype=torch.int32, device=DEVICE)}

    def of(self, document: slice, lengths: tuple[int, ...]) -> "Inputs":
        q, k, v, g_out = (x.detach()[document].clone() for x in (self.q, self.k, self.v, self.g_out))
        return Inputs(q, k, v, g_out, lengths, self.options, self.sinks)


def make(
    lengths, HQ=4, HK=2, D=16, dtype=torch.float32, scale=0.4, sinks=False, parents=None, **options
) -> Inputs:
    q, k, v, g_out = (torch.randn(sum(lengths), H, D).to(DEVICE, dtype) for H in (HQ, HK, HK, HQ))
    drawn = torch.randn(HQ).to(DEVICE, dtype) if sinks else None
    return Inputs(q, k, v, g_out, tuple(lengths), {"scale": scale} | options, drawn, parents)


def run(inputs: Inputs, function=varlen_attention, dtype: torch.dtype | None = None) -> list[Tensor]:
    """out, gq, gk, gv, and the gradient of the sinks where there are any."""
    tensors = (inputs.q, inputs.k, inputs.v, *([] if inputs.sinks is None else [inputs.sinks]))
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
    sinks = {"sinks": leaves[3]} if inputs.sinks is not None else {}
    out = function(*leaves[:3], inputs.cu_seqlens, **inputs.named, **sinks)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs.g_out.to(out.dtype))]


def eager(q, k, v, cu_seqlens, *, scale, window=None, softcap=None, sinks=None, parents=None):
    """transformers' eager attention, of each document alone: all but the softmax in the inputs' dtype.

    A branch is one document with the segments that it continues, of which only its own queries count.
    """
    group, paths, outs = q.shape[1] // k.shape[1], [], []
    ends = cu_seqlens.tolist()
    for segment, tokens in enumerate(map(range, ends, ends[1:])):
        parent = -1 if parents is None else parents[segment].item()
        paths.append([*(paths[parent] if parent >= 0 else []), *tokens])
        q_, k_, v_ = (x[paths[-1]].transpose(0, 1) for x in (q, k, v))
        k_, v_ = (x.repeat_interleave(group, 0) for x in (k_, v_))
        z = q_ @ k_.transpose(1, 2) * scale
        if softcap is not None:
            z = torch.tanh(z / softcap) * softcap
        places = torch.arange(z.shape[-1], device=z.device)
        age = places[:, None] - places[None, :]
        z = z.masked_fill((age < 0) | (age >= (window or math.inf)), torch.finfo(z.dtype).min)
        if sinks is not None:
            z = torch.cat([z, sinks[:, None, None].expand(-1, len(places), 1)], dim=-1)
        weights = z.softmax(-1, dtype=torch.promote_types(z.dtype, torch.float32)).to(z.dtype)
        weights = weights[..., : len(places)]
        outs.append((weights @ v_).transpose(0, 1)[len(places) - len(tokens) :])
    return torch.cat(outs)


def assert_no_worse_than_eager(inputs: Inputs) -> None:
    ours = run(inputs)
    assert [x.dtype for x in ours] == [inputs.q.dtype] * len(ours)
    truth, theirs = run(inputs, eager, torch.float64), run(inputs, eager)
    torch.testing.assert_close(run(inputs, dtype=torch.float64), truth, rtol=1e-9, atol=1e-12)  # the oracle
    assert [x.shape for x in ours] == [x.shape for x in truth]
    slack = 1.5 if inputs.q.dtype == torch.float32 else 1.0
    of_g_product = 2 * torch.finfo(torch.float32).eps * size_of_g_product(inputs)
    names = ("out", "gq", "gk", "gv", "g_sinks")
    for name, x, y, t in zip(names, ours, theirs, truth, strict=False):
        error, yardstick = ((r.double() - t).norm().item() for r in (x, y))
        allowed = slack * yardstick + of_g_product
        assert error <= allowed, f"{name}: {error:.3e} against {yardstick:.3e} of eager"


def size_of_g_product(inputs: Inputs) -> float:
    """About the norm of what the gradients of q and k are sums of: scale * (g_out · v) k."""
    v, k = (x.norm(dim=-1).mean().item() for x in (inputs.v, inputs.k))
    return inputs.options["scale"] * inputs.g_out.norm().item() * v * k / inputs.q.shape[-1] ** 0.5


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(host, "_tiles", lambda q: SMALL)


# Numerics


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_no_less_exact_than_eager(dtype, options, small_tiles):
    assert_no_worse_than_eager(make(RAGGED, dtype=dtype, **options))


def test_one_document():
    assert_no_worse_than_eager(make((129,), 2, 1, D=32, softcap=2.0))


# 2 and 50 end where a tile begins: one key less, and a whole tile is passed over
@pytest.mark.parametrize("window", [1, 2, 17, 50, 1000])
def test_a_window_holds_so_many_keys_with_the_querys_own(window, small_tiles):
    assert_no_worse_than_eager(make((50, 1, 16), 2, 1, window=window))


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (14, 2), (20, 1)])
def test_groups_of_heads(heads, small_tiles):
    """A group of 5 or 7 does not fill a tile, one of 20 is larger than the tile would be."""
    assert_no_worse_than_eager(make((1, 18), *heads, softcap=2.0, window=7))


# Those with launches of their own for v, and one of float32
@pytest.mark.parametrize("tiles_for", [(2, 256, 193), (4, 64, 96)], ids=str)
def test_all_tiles(tiles_for, monkeypatch):
    *key, memory = tiles_for
    tiles = TILES[tuple(key)][memory]
    if DEVICE == "cuda" and memory == 193 and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("the GPU has no memory for them")
    monkeypatch.setattr(host, "_tiles", lambda q: tiles)
    size, D = key
    dtype = torch.float32 if size == 4 else torch.bfloat16
    options = {"scale": D**-0.5, "softcap": 2.0, "window": 67}
    assert_no_worse_than_eager(make((130, 3, 65), 2, 1, D=D, dtype=dtype, **options))


@pytest.mark.parametrize(("enough", "members", "dtype"), [(5, 3, FP32), (9, 2, BF16), (1000, 1, FP32)])
def test_a_group_in_parts(enough, members, dtype, small_tiles, monkeypatch):
    """Two tiles of keys and two key heads are four programs for a whole group."""
    monkeypatch.setattr(host, "_ENOUGH_PROGRAMS", enough)
    inputs = make((5, 20, 0, 7), 12, 2, dtype=dtype, window=9, softcap=2.0)
    assert host._count_members(inputs.q, inputs.k, SMALL.kv_gradient) == members
    assert_no_worse_than_eager(inputs)


@pytest.mark.parametrize(("height", "dtype"), [(300.0, FP32), (-300.0, BF16)])
def test_sinks_far_below_and_far_above_the_logits(height, dtype, small_tiles):
    inputs = make((20, 1, 30), 6, 2, dtype=dtype, sinks=True)
    assert_no_worse_than_eager(replace(inputs, sinks=inputs.sinks + height))


@pytest.mark.parametrize(("size", "dtype"), [(1e-3, FP32), (30.0, BF16)])
def test_logits_far_below_and_far_above_the_softcap(size, dtype, small_tiles):
    inputs = make((20, 30), dtype=dtype, softcap=3.0)
    assert_no_worse_than_eager(replace(inputs, q=inputs.q * size))


# Documents


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_a_document_of_a_row_is_what_it_is_alone_and_its_neighbours_change_no_bit(options, small_tiles):
    inputs = make((5, 19, 0, 18, 3), 2, 1, **options)
    packed, own = run(inputs)[:4], slice(5, 24)
    assert_same([x[own] for x in packed], run(inputs.of(own, (19,)))[:4])
    poisoned = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.g_out)]
    for x in poisoned:
        x[24:42] = torch.nan
    q, k, v, g_out = poisoned
    found = run(replace(inputs, q=q, k=k, v=v, g_out=g_out))[:4]
    assert_same([x[:24] for x in found], [x[:24] for x in packed])
    assert_same([x[42:] for x in found], [x[42:] for x in packed])
    assert all(x[24:42].isnan().all() for x in found)


@pytest.mark.parametrize(
    "lengths", [(5, 33, 20, *[0] * 20), (0, 0, 5, 0, 33, 0, 0, 20), (5, *[0] * 256, 33, 20)]
)
def test_empty_segments_change_no_bit(lengths, small_tiles):
    """As a captured row has them at its end; past 256 of them a tile's segment takes two steps to find."""
    inputs = make((5, 33, 20), window=7)
    assert_same(run(replace(inputs, lengths=lengths)), run(inputs))


# Branches


# a prefix with branches, one of them empty and one shorter than a tile; a document; a prefix at a tile's end
FOREST = (20, 5, 33, 0, 1, 17, 16, 18, 7), (-1, 0, 0, 0, 0, -1, -1, 6, 6)
DEEP = (9, 18, 3, 20, 2, 17, 1, 30), (-1, 0, 1, 1, 3, 0, -1, 6)  # up to three segments above one


def draw_forest(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw lengths and parents of up to 9 segments, in preorder."""
    parents, path = [], [-1]  # the segments that the next one may continue
    for segment in range(rng.randint(2, 9)):
        del path[rng.randint(1, len(path)) :]
        parents.append(path[-1])
        path.append(segment)
    lengths = tuple(rng.choice((0, 1, 2, 7, 15, 16, 17, 24, 33)) for _ in parents)
    return lengths, tuple(parents)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("forest", [FOREST, DEEP], ids=["one level", "deeper"])
def test_branches_are_no_less_exact_than_eager(forest, options, dtype, small_tiles):
    lengths, parents = forest
    assert_no_worse_than_eager(make(lengths, dtype=dtype, parents=parents, **options))


@pytest.mark.parametrize("seed", range(12))
def test_random_branches(seed, small_tiles):
    rng = random.Random(seed)
    lengths, parents = draw_forest(rng)
    options = {"window": rng.choice((None, 1, 3, 16, 30)), "softcap": rng.choice((None, 2.0))}
    heads = rng.choice(((1, 1), (2, 1), (3, 1), (8, 2)))
    sinks = rng.random() < 0.5
    assert_no_worse_than_eager(make((*lengths, 3), *heads, parents=(*parents, -1), sinks=sinks, **options))


# Behind a prefix of 20 in tiles of 16; the first branch has 5 tokens
@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 20, 21, 24, 25, 26, 1000])
def test_a_window_reaches_from_a_branch_into_its_prefix(window, small_tiles):
    lengths, parents = FOREST
    assert_no_worse_than_eager(make(lengths, 2, 1, parents=parents, window=window))


def test_a_group_in_parts_under_a_prefix(small_tiles, monkeypatch):
    monkeypatch.setattr(host, "_ENOUGH_PROGRAMS", 1000)
    lengths, parents = FOREST
    assert_no_worse_than_eager(make(lengths, 6, 2, parents=parents, window=30))


def test_branches_whose_logits_are_all_far_below_zero(small_tiles):
    """A key past a prefix's end would have a logit of 0, and an infinite weight in the gradient of q."""
    lengths, parents = FOREST
    inputs = make(lengths, 2, 1, dtype=BF16, parents=parents)
    assert_no_worse_than_eager(replace(inputs, q=-50 * inputs.q.abs(), k=inputs.k.abs()))


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
def test_a_branch_changes_no_bit_of_another(options, small_tiles):
    """It changes the gradients of the keys that it sees, and what continues it."""
    lengths, parents = (9, 18, 3, 20, 17, 5), (-1, 0, 1, 1, 0, -1)
    inputs = make(lengths, 2, 1, parents=parents, **options)
    expected = [x.split(lengths) for x in run(inputs)[:4]]
    for poisoned, own, above, other in ((1, {1, 2, 3}, {0}, {4, 5}), (3, {3}, {0, 1}, {2, 4, 5})):
        tensors = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "g_out")}
        for x in tensors.values():
            x.split(lengths)[poisoned][:] = torch.nan
        results = [x.split(lengths) for x in run(replace(inputs, **tensors))[:4]]
        assert own | above | other == {*range(len(lengths))}
        for segment in other:
            assert_same([x[segment] for x in results], [x[segment] for x in expected])
        for segment in above:  # their own queries
            assert_same([x[segment] for x in results[:2]], [x[segment] for x in expected[:2]])


def test_parents_of_no_segment_change_no_bit(small_tiles):
    inputs = make((5, 33, 0, 20), **ALL)
    assert_same(run(replace(inputs, parents=(-1,) * 4)), run(inputs))


def test_empty_segments_among_branches_and_behind_them_change_no_bit(small_tiles):
    """Past 256 segments, which branches continue a prefix takes two steps to find."""
    inputs = make((9, 17, 3, 5), 2, 1, parents=(-1, 0, 0, -1))
    padded = replace(inputs, lengths=(9, 17, *[0] * 256, 3, 5, 0, 0), parents=(-1, *[0] * 258, -1, -1, -1))
    assert_same(run(padded), run(inputs))


# Layouts


def test_any_strides(small_tiles):
    inputs = make((5, 20, 9), softcap=2.0)
    expected = run(inputs)
    HQ, HK = inputs.q.shape[1], inputs.k.shape[1]
    nan = torch.full_like(inputs.k, torch.nan)
    fused = torch.cat([nan, inputs.q, inputs.k, inputs.v, nan], 1)
    q, k, v = fused.narrow(1, HK, HQ + 2 * HK).split([HQ, HK, HK], 1)
    assert_same(run(replace(inputs, q=q, k=k, v=v)), expected)

    def inside_out(x):
        return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)

    tensors = {name: inside_out(getattr(inputs, name)) for name in ("q", "k", "v", "g_out")}
    before = {name: x.clone() for name, x in tensors.items()}
    assert_same(run(replace(inputs, **tensors)), expected)
    assert all(torch.equal(x, before[name]) for name, x in tensors.items()), "an input was written to"


@pytest.mark.parametrize("axis", [0, 1])
def test_strides_past_two_to_the_31(axis, small_tiles):
    inputs = make((1, 2), 3, 3, dtype=torch.bfloat16)
    expected = run(inputs)
    far = 2**31 // (inputs.q.shape[axis] - 1) + 8
    strides = [64, 16, 1]
    strides[axis] = far
    q = large_buffer(far * 2 + 1024, torch.bfloat16).as_strided(inputs.q.shape, strides, 0)
    q.copy_(inputs.q)
    assert_same(run(replace(inputs, q=q)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("branches", [False, True])
def test_never_synchronises_and_is_captured_for_other_documents(branches):
    none = (-1,) * 8
    forests = ((-1, 0, 0, -1, -1, -1, -1, -1), (-1, 0, 1, 1, 0, -1, 5, 5), none) if branches else [None] * 3
    inputs = make((100, 28, 200), D=64, dtype=torch.bfloat16, softcap=5.0, window=50)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    cu_seqlens = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    parents = torch.full((8,), -1, dtype=torch.int32, device=DEVICE) if branches else None

    def step():
        out = varlen_attention(*leaves, cu_seqlens, parents=parents, **inputs.options)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs.g_out)]

    cu_seqlens.fill_(328)[0] = 0
    run(replace(inputs, parents=(-1,) * 3 if branches else None))  # compiles
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    assert_no_sync(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    rows = (100, 28, 200, 0, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6, 7, 300), (328, *[0] * 7)
    for lengths, forest in zip(rows, forests, strict=True):
        cu_seqlens[1:] = torch.tensor(lengths).cumsum(0)
        if branches:
            parents.copy_(torch.tensor(forest))
        graph.replay()
        assert_same(results, run(replace(inputs, lengths=lengths, parents=forest)))
