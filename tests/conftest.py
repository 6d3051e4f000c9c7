"""What several test modules share: a tiny model, rows, and runs of the real worker in-process."""

import contextlib
import gc
import importlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from _pytest.logging import catching_logs
from architecture_table import TableWriter
from fake_nvml import plant  # noqa: F401 (a fixture)
from run_files import run_json

# For this process and for all that it starts: compiling the package anew takes a second each time
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before torch: threads that spin while they wait starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # one test process a core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
# With it the settings are the built-in ones, whatever the configs that ship say.
NO_CONFIG = ROOT / "tests" / "fixtures" / "empty.yaml"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one worker more than cores: some always wait, for a process or a timeout."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else 2


def catch_root_logs(catching: catching_logs) -> logging.Handler:
    """Catch what reaches the root logger.

    pytest looks six times a test for loggers that do not propagate, among the hundreds of torch
    and transformers, and adds a handler to each: a millisecond and more.
    """
    root = logging.getLogger()
    if catching.level is not None:
        catching.handler.setLevel(catching.level)
        catching.orig_level = root.level
        root.setLevel(min(root.level, catching.level))
    root.addHandler(catching.handler)
    catching.attached_loggers.append(root)
    return catching.handler


def pytest_configure(config: pytest.Config) -> None:
    catching_logs.__enter__ = catch_root_logs
    gc.disable()  # imports make a million objects, and nothing that could be freed
    config.pluginmanager.register(TableWriter())


def pytest_collection_finish() -> None:
    gc.freeze()  # without a look at a million objects, of which nothing could be freed
    gc.enable()
    gc.set_threshold(10_000)  # a tiny model has some thousand objects, and few cycles


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the process that ranks are forks of, before a test has started threads.

    Only where many modules are collected: elsewhere one is started when it is needed.
    """
    if sys.platform != "linux" or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    import torch
    from rank_processes import begin_server

    if not torch.cuda.is_available():  # a fork cannot use a driver that is initialized
        capture = session.config.pluginmanager.getplugin("capturemanager")
        begin_server(capture.resume_global_capture)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session", autouse=True)
def same_answers() -> None:
    """Compute once what does not change: versions of packages, PEFT's card, and parsed YAML.

    Each run asks for each of them several times, which takes a tenth of its time.
    """
    import yaml
    from jinja2 import Environment

    metadata.version = cache(metadata.version)
    load_yaml = yaml.safe_load
    load_text_once = cache(load_yaml)

    def load(stream: Any) -> Any:
        return deepcopy(load_text_once(stream)) if isinstance(stream, str) else load_yaml(stream)

    yaml.safe_load = load
    compile_template = Environment.compile
    compile_once = cache(compile_template)

    def compile_shared(environment: Environment, *args: Any, **kwargs: Any) -> Any:
        # shared environments are those of jinja2.Template, which nothing changes
        chosen = compile_once if environment.shared else compile_template
        return chosen(environment, *args, **kwargs)

    Environment.compile = compile_shared


def freeze() -> None:
    """Leave what is alive out of later garbage collections: imports hold a million objects."""
    gc.collect()
    gc.freeze()


# What a run does in a fork of itself: each takes 50 ms of a process of tests, and there are thousands
IN_FORKS = (
    patch(
        "sft_play.data.tokenize.tokenize_tasks",
        lambda tasks, chunk_tokenizer, processes: map(chunk_tokenizer, tasks),
    ),
    # the limits of a chunk would end the process of the tests
    patch("sft_play.data.chunk_tokenizer.limited_resources", lambda *_: contextlib.nullcontext()),
    patch("sft_play.data.tokenizer.find_excess", lambda *_: None),
    patch("sft_play.data.tokenizer.refuse_endless", lambda *_: None),
    patch("sft_play.data.template_sources.refuse_endless", lambda *_: None),
)
# Files that are about the processes that tokenize rows, and about what does not end
KEEP_FORKS = (
    "limits",
    "hostile",
    "faults",
    "odd_inputs",
    "data_pipeline",
    "data_tokenizer.py",
    "stops",
)


@pytest.fixture(scope="module", autouse=True)
def forks(request):
    """Tokenize rows in the process of the tests, without limits, except in KEEP_FORKS."""
    with contextlib.ExitStack() as stack:
        for patched in () if any(word in request.path.name for word in KEEP_FORKS) else IN_FORKS:
            stack.enter_context(patched)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_rank_before_its_rows():
    """Start no rank early for a run that is prepared in this process: it would wait to the end.

    What such a rank imports takes 7 seconds. tests/test_early_rank.py starts runs that have one.
    """
    from sft_play.commands.early import EarlyRank

    with patch.object(EarlyRank, "of", return_value=None):
        yield


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer that ships."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "data" / "tiny_llama")


@pytest.fixture(scope="session")
def tiny_base(tokenizer, tmp_path_factory) -> Path:
    """A folder with a Llama of 2 layers, random float32 weights, and the tokenizer that ships."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def base_of(tokenizer, tmp_path_factory) -> Callable[..., Path]:
    """A function that returns the folder of a tiny random base of a model type, with the tokenizer.

    For mode qlora its weights can be packed on every CPU.
    """
    from tiny_models import TINY, WHOLE_BLOCKS, write_base

    folders = {}

    def base(model_type: str, mode: str = "lora") -> Path:
        sizes = WHOLE_BLOCKS if mode == "qlora" else TINY
        if (model_type, sizes) not in folders:
            folder = tmp_path_factory.mktemp(model_type)
            folders[model_type, sizes] = write_base(model_type, folder, tokenizer, sizes)
        return folders[model_type, sizes]

    return base


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> dict[str, Path]:
    """Files of 10 training and 6 validation rows; prompts and answers are of unequal length."""
    folder = tmp_path_factory.mktemp("rows")
    numbers = {"train": (7, 15, 12, 16, 10, 5, 2, 14, 9, 4), "val": (6, 13, 8, 1, 11, 3)}
    files = {name: folder / f"{name}.jsonl" for name in numbers}
    for name, path in files.items():
        records = [
            {
                "question": f"Count to {n}{', slowly' * (n % 3)}.",
                "answer": " ".join(map(str, range(1, n + 1))),
            }
            for n in numbers[name]
        ]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return files


@pytest.fixture(scope="session")
def prepared_rows(rows, tokenizer, tmp_path_factory):
    """The rows above as a run prepares them."""
    from sft_play.config.schema import Config
    from sft_play.data.pipeline import build_run_data

    data = {
        "train_path": str(rows["train"]),
        "val_path": str(rows["val"]),
        "cache_dir": str(tmp_path_factory.mktemp("samples")),
    }
    config = Config.model_validate({"data": data, "model": {"max_seq_len": 2048}})
    return build_run_data(config, tokenizer)


@pytest.fixture(scope="session")
def taught_base(tiny_base, prepared_rows, tokenizer, tmp_path_factory) -> Path:
    """The tiny model, taught the validation rows for two seconds: its answers end, and no two are alike."""
    import torch
    from transformers import AutoModelForCausalLM

    from sft_kernels.loss.head import summed_nll

    split = prepared_rows.validation
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        worst = 0.0
        for row in split:
            loss = (
                summed_nll(
                    model(input_ids=torch.tensor(row.ids[None])).logits,
                    torch.tensor(row.labels[None]),
                )
                / row.trained_tokens
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worst = max(worst, loss.item())
        if worst < 0.02:  # nats a token: every one of them is by far the most likely
            break
    assert worst < 0.02, worst
    folder = tmp_path_factory.mktemp("taught")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def settings_of(tiny_base, rows) -> Callable[..., dict[str, object]]:
    """A function that returns the settings of a quick run, by dotted name, with `changes` on top."""
    quick = {
        "model.name": tiny_base,
        "model.max_seq_len": 256,
        "data.train_path": rows["train"],
        "data.val_path": rows["val"],
        "train.batch_size": 2,
        "train.grad_accum": 2,
        "train.max_steps": 3,
        "train.learning_rate": 0.01,
        "train.lr_scheduler_type": "constant",
        "train.warmup_steps": 0,
        "train.logging_steps": 1,
        "train.save_strategy": "no",
        "train.predict_with_generate": False,
        "train.generation_max_rows": 4,
        "train.generation_max_new_tokens": 8,
        "train.reopen_saved": False,  # a process that imports transformers again takes seconds
    }
    return lambda changes: {**quick, **changes}


def answer_here(
    module: str, request: object, environ: object, may_trace: bool = True
) -> dict[str, Any]:
    """Count or trace a model as the process that counts does, which would first import torch."""
    from sft_play.plan import counting

    if not (may_trace or module == counting.COUNTER):
        return {"refused": "this test traces no model"}
    answer = importlib.import_module(module).answer(json.loads(json.dumps(request)))
    return json.loads(json.dumps(answer))


@pytest.fixture
def traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count models in this process, and guess the activations of those that would be traced."""
    from sft_play.plan import counting

    monkeypatch.setattr(counting, "_ask", partial(answer_here, may_trace=False))
    monkeypatch.setattr(counting, "write_json", lambda *_: None)  # other tests read the cache


@pytest.fixture(scope="session")
def plan_run(settings_of, tmp_path_factory) -> Callable:
    """A function that plans a run on the CPU as `make train` does, up to the launch, and returns its folder.

    Without `may_trace` a model unlike Llama is guessed, as one is that cannot be traced. Rows that
    are tokenized, traces and proofs of kernels are those of earlier runs: all share a cache.
    """
    from sft_play.commands import call as calls
    from sft_play.commands import train as training
    from sft_play.config.invocation import Invocation
    from sft_play.data.pipeline import tokenize_run
    from sft_play.plan import counting
    from sft_play.runs.resumed import AskedRun

    cache_dir = tmp_path_factory.mktemp("cache")

    def plan(
        changes: dict[str, object],
        num_gpus: int = 1,
        deepspeed_config: str | None = None,
        may_trace: bool = True,
    ):
        folders = {"train.output_dir": tmp_path_factory.mktemp("out")}
        if not changes.get("train.probe"):  # a run takes what a probe of an earlier one measured
            folders["data.cache_dir"] = cache_dir
        settings = settings_of({**folders, **changes})
        words = tuple(
            f"{name}={'null' if value is None else value}" for name, value in settings.items()
        )
        call = calls.Call(
            Invocation(
                config=str(NO_CONFIG),
                device="cpu",
                num_gpus=num_gpus,
                run="run",
                deepspeed_config=deepspeed_config,
            ),
            dict(os.environ),
            words,
        )
        loaded = calls.load_config(call)
        with patch.object(counting, "_ask", partial(answer_here, may_trace=may_trace)):
            planned = calls.plan_run(call, loaded, num_gpus > 1, deepspeed_config is not None)
        folder = training.new_run(call, loaded, planned.config)
        planned.write(folder)
        AskedRun.of(loaded, "make train").write(folder)
        folder.write_report(training.planned_report(folder))
        tokenize_run(folder, planned).write(folder)
        return folder

    return plan


@pytest.fixture(scope="session")
def run_worker() -> Callable:
    """A function that runs the worker on a planned folder in this process and returns its exit class."""
    from sft_play.training.entry import run_worker

    def run(folder) -> int:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        freeze()  # a run collects garbage, and brings imports of its own
        try:
            return run_worker(folder.path)
        finally:
            for handler in set(root.handlers) - set(handlers):
                handler.close()
            root.handlers[:] = handlers
            root.setLevel(level)
            logging.captureWarnings(False)

    return run


@pytest.fixture(scope="session")
def train_run(plan_run, run_worker) -> Callable:
    """A function that plans a run as `plan_run` does, trains it, and returns its folder."""

    def run(*settings, **options):
        folder = plan_run(*settings, **options)
        assert run_worker(folder) == 0, run_json(folder)["cause"]
        return folder

    return run


@pytest.fixture(scope="session")
def finished(train_run) -> Callable:
    """A function that returns the folder of a finished quick run of a mode, the same one to every test."""
    runs = {}

    def run(mode: str):
        if mode not in runs:
            changes = {
                "tuning.mode": mode,
                "train.save_strategy": "steps",
                "train.save_steps": 2,
                "train.predict_with_generate": True,
            }
            runs[mode] = train_run(changes)
        return runs[mode]

    return run


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of a lora run, to change."""
    from sft_play.runs.folder import RunFolder

    return RunFolder(shutil.copytree(finished("lora").path, tmp_path / "run"))


@pytest.fixture(scope="session")
def uninterrupted(plan_run) -> Callable:
    """A function that returns a finished run of 12 steps by so many ranks, for those that are killed."""
    from faults.bench import TWELVE, TWELVE_OF_TWO
    from rank_processes import run_ranks

    runs = {}

    def run(ranks: int):
        if ranks not in runs:
            runs[ranks] = plan_run(TWELVE if ranks == 1 else TWELVE_OF_TWO, num_gpus=ranks)
            assert set(run_ranks(runs[ranks], ranks)) == {0}
        return runs[ranks]

    return run


@pytest.fixture(scope="session")
def losses_of() -> Callable:
    """A function that returns the logged losses of a run."""
    return lambda folder: [entry["loss"] for entry in run_json(folder)["loss"]]


@pytest.fixture(scope="session")
def build_loop() -> Callable:
    """A function that returns the trainer of a planned run as the worker builds it, and its data."""
    import torch
    from transformers import set_seed

    from sft_kernels.process import Process
    from sft_play.data.assemble import DataFacts, assemble
    from sft_play.data.tokenizer import load_tokenizer
    from sft_play.models.load import load_model
    from sft_play.plan.run_plan import PlannedRun
    from sft_play.training.arguments import training_arguments
    from sft_play.training.build import build_loop
    from sft_play.training.context import RunContext
    from sft_play.training.memory import MemoryMeter
    from sft_play.training.resume import make_stamp

    def build(folder):
        process = Process.alone(torch.device("cpu"))
        context = RunContext(PlannedRun.read(folder), folder, process, MemoryMeter(process))
        config = context.config
        tokenizer = load_tokenizer(config)
        data = assemble(config, DataFacts.from_json(folder.read_data()).sources)
        set_seed(config.train.seed)
        arguments = training_arguments(context.planned, folder)
        model = load_model(config, process)
        run_stamp = make_stamp(context, data, tokenizer)
        return build_loop(context, arguments, tokenizer, data, model, run_stamp), data

    return build


@pytest.fixture(scope="session")
def counting_run(plan_run, run_worker, taught_base):
    """A lora run of one step on a base that answers: `Count to 6.` and its like. Not to change."""
    folder = plan_run(
        {
            "model.name": taught_base,
            "train.learning_rate": 1e-5,
            "train.max_steps": 1,
            "train.predict_with_generate": True,
            "train.generation_max_new_tokens": "auto",
        }
    )
    assert run_worker(folder) == 0
    return folder


@contextlib.contextmanager
def opening_here() -> Iterator[None]:
    """Open saved weights in this process: one that imports transformers again takes seconds."""
    from sft_play.evaluation import opener, plain

    def run(asked: Path, answered: Path, said: Path) -> int:
        plain.answer_request(str(asked), str(answered))
        return 0

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(opener, "run_opener", run)
        yield


@pytest.fixture(scope="module")
def opens_here():
    """Open saved weights of all tests of a module in this process."""
    with opening_here():
        yield
