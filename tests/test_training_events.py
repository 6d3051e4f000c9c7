"""What callbacks of transformers' API get from the training loop, and what they can ask of it."""

import ast
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from sft_play.training import events

EVENTS = (
    "on_train_begin on_epoch_begin on_step_begin on_substep_end on_pre_optimizer_step "
    "on_optimizer_step on_step_end on_log on_evaluate on_save on_epoch_end on_train_end"
).split()
ALWAYS = {"model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader"}


class Witness(TrainerCallback):
    """Notes each event with its step and what is passed by name."""

    def __init__(self):
        self.seen: list[tuple[str, int, dict]] = []


def noting(event):
    def note(self, args, state, control, **values):
        self.seen.append((event, state.global_step, values))

    return note


for event in EVENTS:
    setattr(Witness, event, noting(event))


class StopsAfterTwo(TrainerCallback):
    """Keeps what it got at the beginning, and leaves a note of its own in it."""

    def on_train_begin(self, args, state, control, **values):
        self.state, self.control = state, control
        assert "TrainerControl" in state.stateful_callbacks
        control.note = "of the callback"

    def on_step_end(self, args, state, control, **values):
        assert state is self.state and control is self.control
        assert control.note == "of the callback"
        return replace(control, should_training_stop=state.global_step == 2)


@pytest.fixture(scope="module")
def seen(plan_run, build_loop):
    settings = {
        "train.packing": False,
        "train.max_steps": 2,
        "train.eval_strategy": "steps",
        "train.eval_steps": 1,
    }
    saves = {"train.save_strategy": "steps", "train.save_steps": 2}
    loop, _ = build_loop(plan_run({**settings, **saves, "train.predict_with_generate": False}))
    witness = Witness()
    loop.events.add(witness)
    loop.start()
    loop.train()
    return loop, witness.seen


def test_every_event_comes_in_transformers_order(seen):
    _, events = seen
    names = [name for name, _, _ in events]
    step = "on_step_begin on_substep_end on_pre_optimizer_step on_optimizer_step on_step_end on_log"
    first = ["on_train_begin", "on_epoch_begin", *step.split(), "on_log", "on_evaluate"]
    assert names[: len(first)] == first
    assert set(names) == set(EVENTS) and names[-1] == "on_train_end"
    assert names.index("on_save") > names.index("on_evaluate")


def test_a_callback_gets_model_optimizer_schedule_loader_logs_and_metrics(seen):
    loop, events = seen
    for _, _, values in events:
        assert values.keys() >= ALWAYS
        assert values["model"] is loop.engine.model
        assert values["optimizer"] is loop.engine.optimizer
        assert values["lr_scheduler"] is loop.engine.lr_scheduler
        assert values["train_dataloader"] is loop.loader
    logs = [values["logs"] for name, _, values in events if name == "on_log"]
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= logs[0].keys()
    metrics = [values["metrics"] for name, _, values in events if name == "on_evaluate"]
    assert all(each["eval_loss"] > 0 for each in metrics) and len(metrics) == 2
    steps = [step for name, step, _ in events if name == "on_step_end"]
    assert steps == [1, 2]


def test_a_callback_ends_training(plan_run, build_loop):
    loop, _ = build_loop(plan_run({"train.max_steps": 5}))
    callback = StopsAfterTwo()
    loop.events.add(callback)
    loop.start()
    loop.train()
    assert loop.state.global_step == callback.state.global_step == 2


def test_transformers_reads_the_state_of_a_checkpoint(plan_run, build_loop):
    settings = {"train.max_steps": 3, "train.save_strategy": "steps", "train.save_steps": 2}
    loop, _ = build_loop(plan_run(settings))
    loop.start()
    loop.train()
    saved = Path(loop.engine.args.output_dir) / "checkpoint-2" / "trainer_state.json"
    state = TrainerState.load_from_json(str(saved))
    assert json.loads(saved.read_text()) == asdict(state), "every field is one of transformers"
    assert (state.global_step, state.max_steps, state.save_steps) == (2, 3, 2)
    assert state.train_batch_size == 2 and state.log_history[-1]["step"] == 2
    assert TrainerControl.from_state(state.stateful_callbacks["TrainerControl"]).should_save


@pytest.mark.parametrize(
    "name, modules",
    [
        ("TrainerState", {"events"}),
        ("TrainerControl", {"events"}),
        ("TrainerCallback", {"events", "observers", "trackers"}),
        ("TrainingArguments", {"arguments", "build", "engine"}),
    ],
)
def test_few_modules_of_the_loop_know_the_types_of_transformers_trainer(name, modules):
    folder = Path(events.__file__).parent
    assert {path.stem for path in folder.glob("*.py") if name in names_in(path)} == modules


def names_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.id for node in nodes if isinstance(node, ast.Name)}
