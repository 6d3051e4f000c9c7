"""Phases and components of a run's memory, and both in run.json.

The counters of a GPU are tested in test_gpu_memory.py.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from rank_processes import run_two, train_on_two
from run_files import run_json
from torch import distributed

from sft_kernels.process import Process
from sft_play.config.schema import Config
from sft_play.models.load import load_model
from sft_play.plan.memory import PHASES
from sft_play.plan.run_plan import read_plan
from sft_play.training.loop import TrainingLoop
from sft_play.training.memory import MemoryMeter, Peaks, components

CPU = torch.device("cpu")
ALONE = Process(0, 0, 1, CPU)


class Noted(MemoryMeter):
    """A meter that notes which phases were entered."""

    def __init__(self) -> None:
        super().__init__(ALONE)
        self.entered: list[str | None] = []

    def enter(self, phase: str | None) -> None:
        super().enter(phase)
        self.entered.append(phase)


def test_a_step_goes_through_its_phases_and_evaluations_and_saves_are_their_own(
    plan_run, build_loop
):
    settings = {
        "train.max_steps": 2,
        "train.packing": False,
        "train.save_strategy": "steps",
        "train.save_steps": 2,
        "train.eval_strategy": "steps",
        "train.eval_steps": 2,
    }
    trainer, _ = build_loop(plan_run(settings))
    trainer.memory = Noted()
    trainer.engine.create_optimizer()
    trainer.memory.watch_optimizer(trainer.engine.optimizer)
    trainer.start()
    trainer.train()
    step = ["forward", "backward", "forward", "backward", "optimizer", None]
    assert trainer.memory.entered == [*step, *step, "evaluation", None, "save", None]


def test_a_phase_that_an_error_ends_is_still_there_to_be_named():
    memory = MemoryMeter(ALONE)
    with pytest.raises(MemoryError), memory.phase("load"):
        raise MemoryError
    assert memory.current_phase == "load"
    with memory.phase("save"):
        assert memory.current_phase == "save"
    assert memory.current_phase is None


def test_a_cpu_has_a_peak_and_no_phases():
    memory = MemoryMeter(ALONE)
    block = torch.ones(64 << 20, dtype=torch.uint8)
    with memory.phase("load"):
        assert memory.run_peak_bytes() > len(block)
    assert (memory.phase_peaks(), memory.context_bytes()) == ({}, 0)


def test_run_json_has_what_was_predicted_of_each_phase(finished):
    folder = finished("lora")
    report, planned = run_json(folder), read_plan(folder).memory
    assert report["memory"]["predicted"] == planned.totals()
    assert planned.totals().keys() == set(PHASES)
    assert report["memory"]["measured"] == {}, "a CPU's allocator counts nothing"
    assert report["peak_bytes"]["predicted"] == planned.predicted_peak
    assert report["peak_bytes"]["measured"] == report["peak_bytes"]["reserved"] > 2**28, (
        "resident memory"
    )
    shown = (folder.logs / "rank-0.log").read_text()
    assert (
        f"peak={report['peak_bytes']['measured'] / 2**30:.2f}GiB predicted={report['peak_bytes']['predicted'] / 2**30:.2f}GiB "
        in shown
    )


# Components


def model_of(tiny_base, mode: str) -> torch.nn.Module:
    config = Config.model_validate({"model": {"name": str(tiny_base)}, "tuning": {"mode": mode}})
    return load_model(config, Process.alone(CPU))


def step_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    return optimizer


def sizes(parameters) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_components_are_counted_to_the_byte(tiny_base, mode):
    model = model_of(tiny_base, mode)
    assert (
        components(model, None, CPU)["gradients"] == components(model, None, CPU)["optimizer"] == 0
    )
    optimizer = step_of(model)
    trained, frozen = (
        [p for p in model.parameters() if p.requires_grad is wanted] for wanted in (True, False)
    )
    held = components(model, optimizer, CPU)
    counters = 4 * len(trained)  # Adam's `step`, a float32 each
    assert tuple(held) == ("weights", "adapters", "gradients", "optimizer")
    assert (
        held["gradients"] == sizes(trained) and held["optimizer"] == 2 * sizes(trained) + counters
    )
    adapters = sizes(trained) if mode == "lora" else 0
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert (held["adapters"], held["weights"]) == (
        adapters,
        sizes(frozen) + sizes(trained) - adapters + buffers,
    ), "tied weights are one"


def test_quantized_weights_count_packed_with_their_constants(tiny_base):
    model = model_of(tiny_base, "qlora")
    blocks = [p for p in model.parameters() if hasattr(p, "quant_state")]
    weights = sum(p.quant_state.shape.numel() for p in blocks)
    rest = sizes(
        p for p in model.parameters() if not p.requires_grad and not hasattr(p, "quant_state")
    ) + sum(b.nbytes for b in model.buffers())
    quantized = components(model, None, CPU)["weights"] - rest
    # half a byte per weight, one byte for each 64 of them; the tables of codes are small, and only
    # matter on a tiny model
    tables = sum(
        state.code.nbytes + state.state2.code.nbytes + state.state2.absmax.nbytes + 4
        for state in (p.quant_state for p in blocks)
    )
    assert (
        len(blocks) == 14
        and weights / 2 + weights / 64 <= quantized <= weights / 2 + weights / 64 + tables
    )


def test_what_lies_elsewhere_is_not_counted(tiny_base):
    model = model_of(tiny_base, "lora")
    assert set(components(model, step_of(model), torch.device("meta")).values()) == {0}


# Several ranks


def be_one_rank(folder: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()

    class Planted(MemoryMeter):
        def phase_peaks(self):
            return {"forward": 10 + rank, **({"save": 7} if rank == 0 else {})}

        def _reserved_peaks(self):
            return [10**12 - rank]

    memory = Planted(Process(rank, rank, 2, CPU))
    torch.save(vars(memory.peaks_over_ranks(PHASES)), folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_the_worst_rank_counts_in_each_phase(tmp_path):
    assert run_two(be_one_rank, tmp_path) == [0, 0]
    assert (
        torch.load(tmp_path / "0.pt")
        == torch.load(tmp_path / "1.pt")
        == vars(Peaks(10**12, 10**12, {"forward": 11, "save": 7}))
    )


def note_phases(folder: Path) -> None:
    """Make a rank write down its phases, and the bytes that it holds in its second step."""
    entered: list[str | None] = []
    enter = MemoryMeter.enter
    build = TrainingLoop.__init__

    def keep_trainer(self, *arguments, **options):
        build(self, *arguments, **options)
        self.memory.trainer = self

    def note(self, phase):
        enter(self, phase)
        entered.append(phase)
        (folder / f"entered-{self.process.rank}.json").write_text(json.dumps(entered))
        file = folder / f"held-{self.process.rank}.json"
        is_first = phase == "optimizer" and not file.exists()
        if is_first and self.trainer.state.global_step == 1:  # now it has a state
            held = components(
                self.trainer.engine.model, self.trainer.engine.optimizer, self.process.device
            )
            file.write_text(json.dumps(held))

    TrainingLoop.__init__ = keep_trainer
    MemoryMeter.enter = note


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("stage, mode", [(2, "lora"), (2, "full"), (3, "full")])
def test_zero_steps_within_its_backward_pass_and_holds_what_was_predicted(plan_run, stage, mode):
    settings = {
        "tuning.mode": mode,
        "train.max_steps": 2,
        "train.packing": False,
        "train.predict_with_generate": False,
    }
    folder = plan_run(settings, num_gpus=2, deepspeed_config=f"configs/deepspeed_zero{stage}.json")
    train_on_two(folder, note_phases, folder.path)
    predicted = vars(read_plan(folder).memory.phases["optimizer"])
    micro_step = ["forward", "backward"]
    for rank in (0, 1):
        # DeepSpeed steps a group of parameters at a time
        entered = json.loads((folder.path / f"entered-{rank}.json").read_text())
        phases = [phase for phase, _ in itertools.groupby(filter(None, entered))]
        begin = phases.index("forward")
        assert (phases[0], phases[begin - 1]) == ("load", "evaluation")
        assert phases[begin : begin + 10] == 2 * [*micro_step, *micro_step, "optimizer"]
        held = json.loads((folder.path / f"held-{rank}.json").read_text())
        gradients = predicted["gradients"]
        for name, expected in {
            "weights": predicted["weights"],
            "adapters": predicted["adapters"],
            "optimizer": 3 * gradients,
        }.items():
            assert held[name] == pytest.approx(expected, rel=0.03, abs=4096), (
                "of the optimizer Adam's two moments, and the copy that ZeRO steps"
            )
        assert 0.99 * gradients <= held["gradients"] <= 4 * gradients, (
            "next to a rank's share lie buckets, and the copy that is stepped"
        )
