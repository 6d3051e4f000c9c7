"""Faults of model folders that anyone may have made, and of checkpoints with code in their pickles."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hostile_folders import Damage, config, copied, sparse, weights, with_values
from hostile_tokenizers import (
    RECURSION,
    TOKENS,
    WORDPIECE,
    added,
    same_ids,
    split,
    template,
    tokenizer,
    with_post_processor,
)

from faults.bench import EVERY_STEP, Bench, Fault, Guard, Outcome
from faults.disks import command_line
from faults.files import nothing
from sft_play.data import tokenizer as tokenizer_files
from sft_play.errors import ExitClass
from sft_play.runs import seal

RECIPE = {"TRAIN_LEARNING_RATE": "auto", "TRAIN_EPOCHS": "auto"}  # so that rows are tokenized


def of_command(
    damage: Damage, command: str, prepare: Callable[[], None] = nothing
) -> Callable[[Bench], Outcome]:
    """Return an injection: a command meets a damaged copy of the tiny model."""

    def inject(bench):
        folder = bench.folder / "base"
        shutil.rmtree(folder, ignore_errors=True)
        damage(copied(folder))
        environ = {"CONFIG": "configs/tiny.yaml", "MODEL_NAME": str(folder), **RECIPE}
        environ |= {"RUST_BACKTRACE": "0"}  # a panic has one line before ours
        environ |= {"TRAIN_OUTPUT_DIR": str(bench.folder), "DATA_CACHE_DIR": str(bench.folder)}
        return command_line(bench, [command], environ, prepare)

    return inject


def watch_closely() -> None:
    """Give a tokenizer a second to be loaded."""
    tokenizer_files.LOAD_SECONDS = 0


def unbounded(one: Any, texts: list[str]) -> list[Any]:
    """Encode texts however long it takes."""
    return [encoding.ids for encoding in one.encode_batch(texts)]


class Pickled:
    """An object whose pickle runs a command."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def pickled(name: str) -> Callable[[Bench], Outcome]:
    """Return an injection: a file is another pickle, and the checkpoint sealed again; it continues."""

    def inject(bench):
        run = bench.copy()
        shutil.rmtree(run.checkpoints / "checkpoint-3")
        checkpoint, ran = run.checkpoints / "checkpoint-2", bench.folder / "ran"
        for file in (name, "training_args.bin"):  # transformers' own, which nothing of ours reads
            torch.save(Pickled(str(ran)), checkpoint / file)
        seal.seal(checkpoint)
        outcome = bench.run({"train.max_steps": 3, "train.resume_from": str(run.path)})
        assert not ran.exists(), "code of the checkpoint was run"
        return outcome

    return inject


def pickled_of_zero3(bench: Bench) -> Outcome:
    """The optimizer state of one of two ranks under ZeRO-3 is another pickle; the run continues."""
    settings = {**EVERY_STEP, "train.max_steps": 3, "train.packing": False}
    engine = {"num_gpus": 2, "deepspeed_config": "configs/deepspeed_zero3.json"}
    run = bench.plan(settings, **engine)
    assert bench.carry_through(run, 2) == 0
    shutil.rmtree(run.checkpoints / "checkpoint-3")
    checkpoint, ran = run.checkpoints / "checkpoint-2", bench.folder / "ran"
    (state,) = checkpoint.rglob("*rank_1*optim_states.pt")
    torch.save(Pickled(str(ran)), state)
    seal.seal(checkpoint)
    again = bench.plan({**settings, "train.resume_from": str(run.path)}, **engine)
    bench.inject_now()
    code = bench.carry_through(again, 2)
    assert not ran.exists(), "code of the checkpoint was run"
    return bench.outcome(again, code, "")


def folder(
    name: str, injected: str, damage: Damage, guard: Guard, *says: str, command: str = "plan"
) -> Fault:
    """Return a row: a model folder is refused."""
    inject = of_command(damage, command)
    return Fault(name, injected, inject, ExitClass.ENVIRONMENT, says, guard, 10, None, True)


BAD_TYPES = config(architectures=[5])
ROWS = (
    folder(
        "hostile-config",
        "config.json has values of other types",
        BAD_TYPES,
        Guard("sft_play.plan.config_json:read_typed", nothing),
        "its config.json says architectures=5",
        "get the model again",
    ),
    folder(
        "hostile-size",
        "tokenizer.json has 300 MiB",
        sparse("tokenizer.json", 300 << 20),
        Guard("sft_play.plan.base_model:refuse_odd_files", nothing),
        "tokenizer.json is of more than 256 MiB",
        "get the model again",
    ),
    folder(
        "hostile-header",
        "the header of the weights is no object",
        weights("[1]"),
        Guard("sft_play.runs.model_folder:_headers", lambda _: []),
        "model.safetensors is damaged",
        "get the model again",
    ),
    folder(
        "hostile-shape",
        "a tensor of the weights has 2^80 numbers",
        weights(f'{{"a": {{"dtype": "F32", "shape": [{1 << 80}], "data_offsets": [0, 8]}}}}'),
        Guard("sft_play.runs.model_folder:_headers", lambda _: []),
        "model.safetensors is damaged",
        "get the model again",
    ),
    folder(
        "hostile-tokenizer",
        "the tokenizer fails on every row",
        WORDPIECE,
        Guard("sft_play.data.render:encode", unbounded),
        "the tokenizer fails",
        "get the model again",
    )._replace(exit_class=ExitClass.DATA),
    folder(
        "hostile-recursion",
        "a macro of the chat template calls itself",
        template(RECURSION),
        Guard("sft_play.data.templates:TOO_DEEP", ()),
        "or calls itself",
        "choose another with MODEL_CHAT_TEMPLATE",
    )._replace(exit_class=ExitClass.DATA),
    folder(
        "hostile-memory",
        "one call of the chat template asks for 600 MB",
        template("{{ 'a' | center(600000000) | length }}"),
        Guard("sft_play.data.template_sources:refuse_endless", nothing),
        "asks for 512 MiB of memory or more",
        "choose another with MODEL_CHAT_TEMPLATE",
    )._replace(exit_class=ExitClass.DATA),
    folder(
        "hostile-stop",
        "generation_config.json says that the stop token is a word",
        with_values("generation_config.json", eos_token_id=["x"]),
        Guard("sft_play.runs.model_folder:refuse_wrong_stops", nothing),
        "generation_config.json: eos_token_id=['x'] is no token's id",
        "get the model again",
    ),
    folder(
        "hostile-pattern",
        "a pattern of the tokenizer backtracks for ever",
        tokenizer(pre_tokenizer=split(r"(.*)*\d\d\d\d$")),
        Guard("sft_play.data.render:encode", unbounded),
        "the tokenizer fails (Onig: Regex search error: retry-limit-in-match over)",
        "get the model again",
    )._replace(exit_class=ExitClass.DATA),
    folder(
        "hostile-template",
        "the chat template is nested 250 deep",
        template("{{ " + "(" * 250 + "1" + ")" * 250 + " }}"),
        Guard("sft_play.data.templates:TOO_DEEP", ()),
        "is nested too deeply, or calls itself",
        "choose another with MODEL_CHAT_TEMPLATE",
    )._replace(exit_class=ExitClass.DATA),
    folder(
        "hostile-same-ids",
        "all tokens have one id, on which the library of tokenizers panics",
        same_ids,
        Guard("sft_play.data.tokenizer:panics_as_errors", contextlib.nullcontext),
        "no tokenizer could be loaded: ",
        "get the model again",
        command="preview",
    ),
    folder(
        "hostile-slow-tokenizer",
        "a tokenizer takes longer to load than any does (1,000,000 pieces; a second)",
        with_post_processor(1_000_000),
        Guard("sft_play.data.tokenizer:find_excess", nothing),
        "no tokenizer could be loaded: has not ended after",
        "get the model again",
    )._replace(inject=of_command(with_post_processor(1_000_000), "preview", watch_closely)),
    folder(
        "hostile-long-token",
        "an added token has 10,000 characters",
        tokenizer(added_tokens=[*TOKENS, *added(1, content="a" * 10_000)]),
        Guard("sft_play.data.tokenizer:MAX_TOKEN_CHARACTERS", 1 << 30),
        "has 10,000 characters, more than 4,096",
        "get the model again",
        command="preview",
    ),
    folder(
        "hostile-many-tokens",
        "a tokenizer has 70,000 added tokens",
        tokenizer(added_tokens=[*TOKENS, *added(70_000)]),
        Guard("sft_play.runs.model_folder:MAX_ADDED", 1 << 30),
        "is a tokenizer with more than 65536 added tokens",
        "get the model again",
    ),
    folder(
        "hostile-letter",
        "the letter a is a special token, which stands in every row",
        tokenizer(added_tokens=[*TOKENS, *added(1, content="a")]),
        Guard("sft_play.data.special_text:RenderError", KeyError),
        "cannot read its tokens (Token `a` out of vocabulary",
        "allow reads it as the token",
        command="preview",
    )._replace(exit_class=ExitClass.DATA),
    Fault(
        "pickled-zero3",
        "the optimizer state of a rank under ZeRO-3 is a pickle that runs a command",
        pickled_of_zero3,
        ExitClass.CHECKPOINT,
        ("is a pickle that could run any code", "choose another checkpoint"),
        Guard("sft_play.training.checkpoints:loading_plain", contextlib.nullcontext),
        60,
    ),
    *(
        Fault(
            f"pickled-{Path(name).stem.replace('_', '-')}",
            f"{name} is a pickle that runs a command, and its folder sealed again",
            pickled(name),
            ExitClass.CHECKPOINT,
            ("is a pickle that could run any code", "choose another checkpoint"),
            Guard("sft_play.training.checkpoints:loading_plain", contextlib.nullcontext),
            30,
            is_quick=name == "optimizer.pt",
        )
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")
    ),
)
