"""Replayed layers compute what the layers compute. Here a replay launches again what was recorded.

On a GPU it is a CUDA graph: test_gpu_graphs.py.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from marks import long
from plan_examples import CPU as CPU_ONLY
from plan_examples import plan_for
from test_fast_install import INPUTS, MODELS, make, plain_model, settings
from test_packed_training import MAX_SEQ_LEN, documents

from sft_play.data import packing
from sft_play.data.collate import Batch, PackCollator, PadCollator, TrainRows
from sft_play.models.checkpointing import checkpoint_layers
from sft_play.models.fast.documents import Documents
from sft_play.models.fast.graphs import decoder as graphs_of_decoder
from sft_play.models.fast.graphs.decoder import (
    GraphCounts,
    GraphedDecoder,
    graph_layers,
    graph_setup,
)
from sft_play.models.fast.graphs.recorded import (
    Computed,
    DecoderCall,
    RecordedPass,
    Shape,
    StaticGradients,
    StaticInputs,
    common_shape,
    shape_of_recording,
)
from sft_play.models.fast.loss.head import fused_nll
from sft_play.plan.fast import why_not_recorded
from sft_play.process import Process
from sft_play.training.batches import LOSS_POSITIONS, LOSS_TARGETS, collate_for_step

MICRO_BATCHES = 3  # of a step


def again(launch: Callable[[], None]) -> Callable[[], None]:
    """Stand for a recording: its replay is another launch."""
    launch()
    return launch


def micro_batches(count: int, is_packed: bool, in_one_row: bool = False) -> Iterator[Batch]:
    """Yield micro-batches of two sequences; packed ones hold one to four documents each."""
    rows = TrainRows(documents(40))
    collator: PackCollator | PadCollator = PadCollator(0, MAX_SEQ_LEN)
    if is_packed:
        collator = PackCollator(0, MAX_SEQ_LEN, True, in_one_row=in_one_row)
    draw = random.Random(0)
    for _ in range(count):
        sequences = []
        for _ in range(4 if in_one_row else 2):
            most = draw.randint(1, 4) if is_packed else 1
            chosen = draw.sample(range(40), most)
            while sum(len(rows.samples[index].ids) for index in chosen) > MAX_SEQ_LEN:
                chosen.pop()
            sequences.append(rows[chosen])
        yield collate_for_step(collator, sequences)


def trained(model: Any, batches: list[Batch]) -> list[tuple[float, list[torch.Tensor]]]:
    """Return loss and gradients of each step of several micro-batches."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps = []
    for start in range(0, len(batches), MICRO_BATCHES):
        model.zero_grad()
        total = 0.0
        for batch in batches[start : start + MICRO_BATCHES]:
            inputs = {name: batch[name] for name in INPUTS if name in batch}
            labels = (batch[LOSS_POSITIONS], batch[LOSS_TARGETS])
            loss = fused_nll(model, model, inputs, *labels) / 100
            loss.backward()
            total += loss.item()
        steps.append((total, [parameter.grad.clone() for parameter in parameters]))
    return steps


def graphed(model: Any, **options: Any) -> GraphedDecoder:
    base = model.get_base_model().get_decoder()
    base.forward = GraphedDecoder(model, lambda: again, **options)
    return base.forward


def fused(name: str = "llama") -> Any:
    """Return a tiny model with fused kernels."""
    model = plain_model(name)
    make(model)
    return model


def graphed_llama(**options: Any) -> tuple[Any, GraphedDecoder]:
    model = fused()
    return model, graphed(model, **options)


def trains_as_launched(model: Any, batches: list[Batch]) -> GraphedDecoder:
    """Return the decoder of a model that trains as before with recordings."""
    expected = trained(model, batches)
    decoder = graphed(model)
    for (loss, gradients), (wanted_loss, wanted) in zip(
        trained(model, batches), expected, strict=True
    ):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-6)
    return decoder


LAYOUTS = {"packed": (True, False), "in-one-row": (True, True), "padded": (False, False)}
QUICK = [("llama", "packed"), ("llama", "padded"), ("gemma3", "in-one-row")]
NAMES = ("llama", "gemma3", "qwen3", "qwen2-window")
LONG = [long(*pair) for pair in itertools.product(NAMES, LAYOUTS) if pair not in QUICK]


@pytest.mark.parametrize("name, layout", [*QUICK, *LONG])
def test_replayed_steps_have_the_losses_and_gradients_of_launched_ones(name, layout, monkeypatch):
    is_packed, in_one_row = LAYOUTS[layout]
    monkeypatch.setattr(packing, "ROW_STEP", 8)  # rows of a few hundred tokens have many lengths
    batches = list(micro_batches(30, is_packed, in_one_row))
    decoder = trains_as_launched(fused(name), batches)
    assert decoder.counts.replayed >= 6 and decoder.counts.stopped is None
    assert decoder.counts.replayed + decoder.counts.launched == len(batches)
    if in_one_row:
        widths = {batch["input_ids"].shape[1] for batch in batches}
        assert len(widths) > len(decoder.first), "rows are filled up to few lengths"


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    "kind", [("llama", {}), ("qwen3_moe", MIXTURE)], ids=["recomputed", "recomputed experts"]
)
def test_layers_that_are_recomputed_are_replayed_and_so_are_experts(kind, monkeypatch):
    monkeypatch.setitem(MODELS, "this", kind)
    model = fused("this")
    checkpoint_layers(model, 1)
    decoder = trains_as_launched(model, list(micro_batches(12, is_packed=False)))
    assert decoder.counts.replayed >= 6 and decoder.counts.stopped is None


def test_layers_have_run_and_freed_their_memory_before_a_recording_takes_its_own(monkeypatch):
    model, decoder = graphed_llama()
    events: list[str] = []
    decoder.free_cache = lambda: events.append("freed")
    own = decoder.forward
    decoder.forward = lambda *args, **kwargs: events.append("layers") or own(*args, **kwargs)
    record = RecordedPass.__init__
    monkeypatch.setattr(
        RecordedPass, "__init__", lambda *args: events.append("recorded") or record(*args)
    )
    batch = next(micro_batches(1, True))
    trained(model, [batch] * 4)
    assert decoder.counts.replayed == 3
    proof = ["layers", "layers", "freed", "recorded"]  # of it `again` runs the layers once more
    assert [event for event in events if event != "layers"] == ["freed", "recorded"]
    assert events[:4] == proof


def test_recordings_give_their_memory_back_where_layers_run_by_themselves():
    model, decoder = graphed_llama()
    pools: list[None] = []
    decoder.new_record = lambda: pools.append(None) or again
    one, *others = micro_batches(20, False)
    other = next(each for each in others if each["input_ids"].shape != one["input_ids"].shape)
    trained(model, [one] * 3)
    assert len(decoder.recorded) == 1
    trained(model, [other])
    assert (len(decoder.recorded), len(pools)) == (0, 1)
    trained(model, [one, other, one, other])
    assert (len(decoder.recorded), len(pools)) == (2, 2), "one is recorded again without the layers"
    assert (decoder.counts.launched, decoder.counts.replayed) == (2, 6)
    with torch.no_grad():
        model.eval()(**{name: one[name] for name in INPUTS if name in one})
    model.train()
    assert not decoder.recorded
    trained(model, [one, other])
    assert (decoder.counts.launched, decoder.counts.replayed) == (2, 8)


def test_nothing_is_recorded_where_shapes_are_too_many(monkeypatch):
    monkeypatch.setattr(graphs_of_decoder, "MOST_RECORDINGS", 1)
    decoder = trains_as_launched(fused(), list(micro_batches(24, False)))
    assert decoder.counts.stopped == "micro-batches have more than 1 shapes"
    assert not decoder.recorded and decoder.counts.launched > 12


def test_evaluation_runs_the_layers_themselves():
    model, decoder = graphed_llama()
    batch = next(micro_batches(1, True))
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
    assert expected.shape[-1] == model.config.vocab_size
    assert decoder.counts == GraphCounts() and not decoder.first


def keeps_its_tokens(inputs: StaticInputs, fill: Callable[[], None]) -> None:
    before = inputs.input_ids.clone()
    fill()
    if before.any():
        inputs.input_ids.copy_(before)


def joins_two_documents(inputs: StaticInputs, fill: Callable[[], None]) -> None:
    fill()
    inputs.documents.boundaries[1] = inputs.documents.boundaries[2]


@pytest.mark.parametrize(
    "mistake, in_one_row, has_labels",
    [
        (keeps_its_tokens, False, True),
        (keeps_its_tokens, False, False),
        (joins_two_documents, True, True),
    ],
)
def test_a_recording_that_reads_other_memory_is_found_and_not_used(
    mistake, in_one_row, has_labels, caplog, monkeypatch
):
    fill = StaticInputs.fill
    monkeypatch.setattr(
        StaticInputs, "fill", lambda self, call: mistake(self, lambda: fill(self, call))
    )
    batches = list(micro_batches(24, in_one_row, in_one_row))
    if has_labels:
        decoder = trains_as_launched(fused(), batches)
    else:
        model, decoder = graphed_llama()
        none = {LOSS_POSITIONS: batches[0][LOSS_POSITIONS][:0]}
        none[LOSS_TARGETS] = batches[0][LOSS_TARGETS][:0]
        trained(model, [{**batch, **none} for batch in batches])
    assert "differs by" in decoder.counts.stopped and "differs by" in caplog.text
    assert decoder.counts.replayed == 0


@pytest.mark.parametrize("in_one_row", [False, True], ids=["padded", "in-one-row"])
def test_rounding_of_other_kernels_is_allowed_for_rows_that_are_filled_up_alone(
    in_one_row, monkeypatch
):
    monkeypatch.setattr(packing, "ROW_STEP", 8)
    monkeypatch.setattr(RecordedPass, "difference", rounded_otherwise)
    model, decoder = graphed_llama()
    trained(model, list(micro_batches(45, in_one_row, in_one_row)))
    if in_one_row:
        assert decoder.counts.replayed > 0 and decoder.counts.difference == 5e-2
    else:
        assert decoder.counts.stopped.endswith("differs by 5.0e-02")


def rounded_otherwise(self: RecordedPass, call: DecoderCall, computed: Computed) -> float:
    """Stand for a difference of 5e-2 of padded rows, and of rows in one that are filled up."""
    self.inputs.fill(call)
    return 5e-2 if self.is_filled_up or call.documents is None else 0.0


class Overwrites(torch.autograd.Function):
    """A last norm whose kernel writes the gradient of its input over that of its output."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.mul_(2)


def test_a_kernel_that_overwrites_its_gradient_proves_itself_too():
    model = plain_model("llama")
    make(model)
    base = model.get_base_model().get_decoder()
    own = base.forward

    def overwriting(*args, **kwargs):
        output = own(*args, **kwargs)
        output.last_hidden_state = Overwrites.apply(output.last_hidden_state)
        return output

    base.forward = overwriting
    decoder = graphed(model)
    trained(model, list(micro_batches(24, False)))
    assert decoder.counts.stopped is None and decoder.counts.replayed > 0


def test_layers_that_cannot_be_recorded_run_as_always(caplog):
    model, decoder = graphed_llama()

    def refuses(launch):
        raise RuntimeError("operation not permitted when stream is capturing\nat line 7")

    decoder.new_record = lambda: refuses
    decoder.record = refuses
    trained(model, list(micro_batches(9, False)))
    assert decoder.counts.replayed == 0
    words = "operation not permitted when stream is capturing"
    assert words in decoder.counts.stopped and words in caplog.text
    assert "0 of 9 micro-batches" in decoder.counts.line()


def test_a_gradient_that_is_no_number_is_found_whichever_it_is(monkeypatch):
    model, decoder = graphed_llama()
    replay = RecordedPass._backward

    def backward(self):
        replay(self)
        self.gradients.buffers[-1].fill_(torch.nan)

    monkeypatch.setattr(RecordedPass, "_backward", backward)
    batch = next(micro_batches(1, False))
    trained(model, [batch] * 3)
    assert decoder.counts.stopped.endswith("differs by inf") and not decoder.recorded


@pytest.mark.parametrize(
    "lengths, rows, most_tokens, shape",
    [
        ([64, 64], 2, None, (64, 2, 64)),  # a row is a document
        ([40, 24, 64], 2, None, (64, 64, 64)),
        ([20, 20, 24, 30, 34], 2, None, (64, 64, 64)),
        ([4] * 32, 2, None, (64, 64, 64)),
        ([4] * 64, 2, None, (128, 128, 128)),
        ([500] * 11, 1, None, (5632, 64, 2048)),
        ([2000, 2000, 2300], 1, 6400, (6400, 64, 4096)),  # not 6656
        ([2000] * 3, 1, 6400, (6144, 64, 2048)),
        ([3000, 2500], 1, None, (5632, 64, 4096)),
        ([512] * 63, 1, None, (32768, 64, 2048)),
        ([512] * 64, 1, None, (32768, 128, 2048)),  # one more for the padding
    ],
)
def test_documents_are_padded_to_few_shapes(lengths, rows, most_tokens, shape):
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    ids = torch.zeros(rows, sum(lengths) // rows, dtype=torch.int64)
    found = shape_of_recording(ids, Documents(boundaries, max(lengths)), most_tokens)
    assert found == Shape(rows, *shape)


def test_ranks_that_compute_together_agree_on_a_shape():
    short, long = Shape(1, 1152, 64, 2048), Shape(1, 1280, 128, 1024)
    assert common_shape([short, long]) == Shape(1, 1280, 128, 2048), "a single row is filled up"
    assert common_shape([Shape(2, 64, 0, 64)] * 2) == Shape(2, 64, 0, 64)
    assert common_shape([Shape(2, 64, 0, 64), Shape(2, 72, 0, 72)]) is None, "rows of two lengths"
    assert common_shape([short, Shape(2, 1152, 64, 2048)]) is None, "not as many rows"
    assert common_shape([short, None]) is None


def test_no_recording_is_larger_than_a_micro_batch_of_the_run():
    model, decoder = graphed_llama(most_tokens=1100)
    rows = TrainRows(documents(40))
    chosen: list[int] = []
    while sum(len(rows.samples[index].ids) for index in chosen) <= 1024:
        chosen.append(len(chosen) % 40)
    batch = collate_for_step(PackCollator(0, 2048, True, in_one_row=True), [rows[chosen]])
    trained(model, [batch])
    assert [shape.tokens for shape in decoder.first] == [1100], "not 1,152"


def test_gradients_stay_where_they_are():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    gradients = StaticGradients(parameters)
    parameters[1].grad = torch.ones(2)  # of a micro-batch that was launched
    gradients.buffers[0] += 5  # of the step before
    gradients.use_static_buffers()
    gradients.add([torch.ones(2), torch.ones(2), None])
    gradients.use_static_buffers()
    assert [parameter.grad.tolist() for parameter in parameters] == [[1, 1], [2, 2], [0, 0]]
    for parameter, buffer in zip(parameters, gradients.buffers, strict=True):
        assert parameter.grad is buffer


@pytest.mark.parametrize(
    "change", ["tuning.mode=full", "train.neftune_noise_alpha=5", "tuning.lora.dropout=0.1", ""]
)
def test_why_layers_are_not_recorded_is_said(change):
    planned = plan_for(CPU_ONLY, *change.split())
    cpu = planned.plan.ranks
    model = fused()
    reason = why_not_recorded(graph_setup(model, planned.config, replace(cpu, device="cuda")))
    assert reason is None if not change else change.partition("=")[0] in reason
    why_not = why_not_recorded(graph_setup(model, planned.config, cpu))
    assert why_not == "the model is not on a GPU"


@pytest.mark.parametrize("is_said", [True, False])
def test_what_the_plan_has_said_of_graphs_is_not_said_again(is_said, caplog):
    plan = plan_for(CPU_ONLY, "train.cuda_graphs=true").plan
    (sentence,) = (each for each in plan.warnings if "cuda_graphs" in each)
    config = settings(cuda_graphs=True)
    known = plan if is_said else replace(plan, warnings=())
    alone = Process.alone(torch.device("cpu"))
    assert graph_layers(fused(), config, known, alone) is None
    said = [record.message for record in caplog.records if "cuda_graphs" in record.message]
    assert said == ([] if is_said else [f"warning: {sentence}"])
