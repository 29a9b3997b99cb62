"""Sampling inside the graph: the tokens of the host-side sampler's specification, and its statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.sampling_params import SamplingParams
from phalanx.core.step import Finish
from phalanx.kernels import sample, sample_workspace_size
from phalanx.kernels.sample import CHUNK, DRAW_BLOCK, sums_start
from phalanx.sampling import choose
from phalanx.sampling.reference import reference_sample

BACKENDS = ["torch", "triton"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # compiled there, interpreted here
cuda_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
few = settings(max_examples=max(10, settings.default.max_examples // 3))  # the interpreter is slow
NONE, STOP, ERROR = int(Finish.NONE), int(Finish.STOP), int(Finish.ERROR)


class Table:
    """Parameter columns laid out as in the engine: strided views of joined tables."""

    def __init__(self, num_rows, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.floats = torch.zeros(num_rows, 6, device=DEVICE)
        self.ints = torch.full((num_rows, 19), -1, dtype=torch.int32, device=DEVICE)
        self.temperature = self.floats[:, 0]
        self.prompt_lens, self.stop_ids = self.ints[:, 2], self.ints[:, 3:]
        self.seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=gen).to(DEVICE)
        self.prompt_lens.copy_(torch.randint(1, 50, (num_rows,), generator=gen))

    def sample(self, logits, rows, generated, backend, **more):
        rows = torch.as_tensor(rows, device=DEVICE)
        counts = torch.as_tensor(generated, device=DEVICE)
        args = (logits, self.temperature, self.seeds, rows, self.stop_ids)
        return sample(*args, num_generated=counts, backend=backend, **more)


def logits_of(bs, vocab, seed=0, dtype=torch.float32, spread=2.0):
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(bs, vocab, generator=gen) * spread).to(DEVICE, dtype)


def specified(table, logits, row, generated):
    """The token by `sampling.reference`, or None where the logits are not finite."""
    params = SamplingParams(
        temperature=float(table.temperature[row]), sampling_seed=int(table.seeds[row]), max_new_tokens=None
    )
    return reference_sample(logits.double().cpu().numpy(), params, output=[0] * generated)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.fuzz
@few
@given(
    vocab=st.sampled_from([1, 2, 255, 256, 257, 700, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300]),
    temperatures=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    spread=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 10**6),
)
def test_tokens_are_the_specified_ones(backend, vocab, temperatures, dtype, spread, seed):
    bs = len(temperatures)
    table, logits = Table(bs + 1, seed), logits_of(bs, vocab, seed, dtype, spread)
    rows = np.random.default_rng(seed).permutation(bs + 1)[:bs]
    table.temperature[torch.from_numpy(rows).to(DEVICE)] = torch.tensor(temperatures, device=DEVICE)
    generated = [seed % 7 + lane for lane in range(bs)]
    tokens, finish = table.sample(
        logits, torch.from_numpy(rows), torch.tensor(generated, dtype=torch.int32), backend
    )
    assert tokens.dtype == torch.int32 and finish.dtype == torch.uint8 and not finish.any()
    for lane, row in enumerate(rows):
        want = specified(table, logits[lane], int(row), generated[lane])
        assert int(tokens[lane]) == want


def test_backends_agree_and_frequencies_are_the_probabilities():
    """20,000 draws by torch, of them 300 by Triton too; 5 standard deviations at most."""
    num, vocab = 20000, 40
    table, logits = Table(num, 3), logits_of(1, vocab, 5).expand(num, -1)
    table.temperature.fill_(0.7)
    rows, generated = torch.arange(num), torch.zeros(num, dtype=torch.int64)
    tokens, _ = table.sample(logits, rows, generated, "torch")
    again, _ = table.sample(logits[:300], rows[:300], generated[:300], "triton")
    assert torch.equal(tokens[:300], again)
    probs = torch.softmax(logits[0].double() / 0.7, 0).cpu()
    counts = torch.bincount(tokens.cpu(), minlength=vocab)
    sigma = (num * probs * (1 - probs)).sqrt()
    assert ((counts - num * probs).abs() <= 5 * sigma + 1).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_index(backend, dtype):
    vocab = 2 * CHUNK + 9
    logits = torch.full((4, vocab), -3.0, dtype=dtype, device=DEVICE)
    logits[0, [CHUNK, 2 * CHUNK + 1]] = 5.0
    logits[1, [7, 8, CHUNK + 7]] = 5.0
    logits[2, [vocab - 2, vocab - 1]] = 5.0
    tokens, finish = Table(4).sample(logits, torch.arange(4), torch.zeros(4, dtype=torch.int32), backend)
    assert tokens.tolist() == [CHUNK, 7, vocab - 2, 0] and not finish.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_end_in_error_and_leave_their_neighbours_alone(backend, temperature):
    table, logits = Table(7), logits_of(7, CHUNK + 50)
    table.temperature.fill_(temperature)
    table.stop_ids[:, 0] = 0  # an error's token 0 is no stop
    clean, _ = table.sample(logits, torch.arange(7), torch.zeros(7, dtype=torch.int32), backend)
    logits[1, CHUNK + 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4] = torch.nan
    logits[5, : CHUNK + 1] = -torch.inf
    tokens, finish = table.sample(logits, torch.arange(7), torch.zeros(7, dtype=torch.int32), backend)
    assert finish.tolist() == [NONE, ERROR, ERROR, ERROR, ERROR, NONE, NONE]
    assert tokens[1:5].tolist() == [0, 0, 0, 0]
    assert tokens[[0, 6]].tolist() == clean[[0, 6]].tolist() and tokens[5] > CHUNK


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_minus_infinity_are_never_drawn(backend):
    table, logits = Table(40), torch.full((40, CHUNK + 20), -torch.inf, device=DEVICE)
    table.temperature.fill_(1.0)
    allowed = torch.tensor([3, 900, CHUNK - 1, CHUNK + 5])
    logits[:, allowed] = 0.0
    tokens, finish = table.sample(logits, torch.arange(40), torch.arange(40), backend)
    assert set(tokens.tolist()) == set(allowed.tolist()) and not finish.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_stop_ids(backend):
    table, logits = Table(5), torch.zeros(4, 30, device=DEVICE)
    logits[torch.arange(4), torch.tensor([29, 4, 0, 6])] = 9.0
    table.stop_ids[1, 15], table.stop_ids[2, 0], table.stop_ids[3, 0] = 29, 5, 0
    rows = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    tokens, finish = table.sample(logits, rows, torch.zeros(4, dtype=torch.int32), backend)
    assert tokens.tolist() == [29, 4, 0, 6] and finish.tolist() == [STOP, NONE, STOP, NONE]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lane_depends_on_itself_alone(backend):
    table, wide = Table(9, 4), logits_of(6, CHUNK + 111, 8, torch.bfloat16)
    table.temperature.copy_(torch.tensor([0, 1, 0.5, 2, 1, 1, 0, 1, 1.0]))
    logits = wide[:, 11:]  # strided rows
    rows, generated = torch.tensor([8, 1, 0, 3, 5, 2]), torch.tensor([0, 4, 9, 1, 1, 0])
    tokens, _ = table.sample(logits, rows, generated, backend)
    order = torch.tensor([4, 0, 2, 5, 1, 3])
    moved, _ = table.sample(logits[order], rows[order], generated[order], backend)
    assert torch.equal(moved, tokens[order])
    for lane in range(3):
        one = slice(lane, lane + 1)
        alone, _ = table.sample(logits[one].contiguous(), rows[one], generated[one], backend)
        assert torch.equal(alone, tokens[one])


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_from_lengths_and_buffers_of_the_caller(backend):
    table, logits = Table(8, 2), logits_of(5, 100)
    table.temperature.fill_(1.5)
    rows, generated = torch.tensor([7, 2, 5, 1, 3], device=DEVICE), torch.tensor([0, 3, 1, 8, 2])
    want, _ = table.sample(logits, rows, generated, backend)
    other, _ = table.sample(logits, rows, generated + 1, backend)
    assert not torch.equal(want, other)
    tokens = torch.full((5,), -7, dtype=torch.int32, device=DEVICE)
    finish = torch.full((5,), 77, dtype=torch.uint8, device=DEVICE)
    seq_lens = (generated.to(DEVICE) + table.prompt_lens[rows]).int()
    scratch = torch.full((sample_workspace_size(5, 100),), torch.nan, device=DEVICE)
    got = sample(
        *(logits, table.temperature, table.seeds, rows, table.stop_ids),
        seq_lens=seq_lens,
        prompt_lens=table.prompt_lens,
        tokens=tokens,
        finish=finish,
        workspace=scratch,
        backend=backend,
    )
    assert got[0] is tokens and got[1] is finish
    assert torch.equal(tokens, want) and not finish.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_temperatures(backend):
    table, logits = Table(3), logits_of(3, 500)
    table.temperature.copy_(torch.tensor([1e-5, 1e-38, 1e6]))
    tokens, finish = table.sample(logits, torch.arange(3), torch.zeros(3, dtype=torch.int64), backend)
    assert tokens[:2].tolist() == logits[:2].argmax(1).tolist() and not finish.any()
    table.temperature[2] = 1e-5
    cold, _ = table.sample(logits, torch.arange(3), torch.zeros(3, dtype=torch.int64), backend)
    assert tokens[2] != cold[2]


@pytest.mark.parametrize("bs", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("vocab_size", [1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_maxima_and_sums_lie_apart_and_aligned(bs, vocab_size):
    start, end = sums_start(bs, vocab_size), sample_workspace_size(bs, vocab_size)
    assert start % 4 == 0  # of fp32: 16 bytes
    assert start >= bs * -(-vocab_size // CHUNK) and end - start == bs * -(-vocab_size // DRAW_BLOCK)


def test_bad_arguments_are_named():
    table, logits = Table(3), logits_of(2, 10)
    rows, counts = (torch.zeros(2, dtype=torch.int64, device=DEVICE) for _ in range(2))
    args = (logits, table.temperature, table.seeds, rows, table.stop_ids)
    with pytest.raises(ValueError, match="either num_generated or both"):
        sample(*args)
    with pytest.raises(ValueError, match="either num_generated or both"):
        sample(*args, seq_lens=counts)
    with pytest.raises(ValueError, match="exclude each other"):
        sample(*args, num_generated=counts, seq_lens=counts)
    with pytest.raises(ValueError, match="num_generated must have shape"):
        sample(*args, num_generated=counts[:1])
    with pytest.raises(TypeError, match="temperature must be float32"):
        sample(logits, table.temperature.double(), *args[2:], num_generated=counts)
    with pytest.raises(ValueError, match="seeds must have shape"):
        sample(*args[:2], table.seeds[:2], *args[3:], num_generated=counts)
    with pytest.raises(ValueError, match="logits must have a last stride of 1"):
        sample(logits_of(10, 2).T, *args[1:], num_generated=counts)
    with pytest.raises(ValueError, match="logits must have 1 to"):
        sample(logits[:, :0], *args[1:], num_generated=counts)
    with pytest.raises(ValueError, match="workspace has 1 entries, 6 are needed"):
        sample(*args, num_generated=counts, workspace=torch.zeros(1, device=DEVICE))
    with pytest.raises(TypeError, match="tokens must be int32"):
        sample(*args, num_generated=counts, tokens=counts)


def test_sampler_and_kernel_share_their_blocks():
    assert DRAW_BLOCK == choose.DRAW_BLOCK and CHUNK % DRAW_BLOCK == 0


@cuda_only
def test_graph_replays_read_everything_on_the_device():
    table, logits = Table(300, 1), logits_of(256, 151936, 2, torch.bfloat16)
    rows = torch.arange(1, 257, device=DEVICE)
    counts = torch.zeros(256, dtype=torch.int32, device=DEVICE)
    args = (logits, table.temperature, table.seeds, rows, table.stop_ids)
    sample(*args, num_generated=counts)  # compile outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, finish = sample(*args, num_generated=counts)
    for step in range(3):
        logits.copy_(logits_of(256, 151936, step, torch.bfloat16))
        counts += 1
        table.temperature.copy_((torch.arange(300) % 3) * 0.5)
        rows.copy_(torch.randperm(299)[:256] + 1)
        graph.replay()
        want = sample(*args, num_generated=counts, backend="torch")
        assert torch.equal(tokens, want[0]) and torch.equal(finish, want[1])
