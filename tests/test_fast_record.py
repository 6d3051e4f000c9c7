"""What one start has proved of fused kernels, the next one takes; and nothing else."""

import importlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import long
from rank_processes import run_two
from tiny_models import tiny_model, with_adapters
from torch import distributed

from sft_kernels.install import FusedKernels, fused_kernels_of
from sft_kernels.linears import mlp
from sft_kernels.process import Process
from sft_play import timeline
from sft_play.config.schema import Config
from sft_play.models import proofs as proofs_module
from sft_play.models.fast import install_fused_kernels
from sft_play.models.proofs import ProofStore
from sft_play.plan import counting

CONFIG = Config.model_validate({"tuning": {"lora": {"dropout": 0.0}}})
ALONE = Process.alone(torch.device("cpu"))
ALL = {"LlamaAttention", "LlamaMLP", "LlamaDecoderLayer"}  # the classes that are proved


def start(
    folder: Path,
    environ: Mapping[str, str] | None = None,
    process: Process = ALONE,
    rank: int = 4,
    norm: type | None = None,
    **changes: Any,
) -> tuple[set[str], FusedKernels]:
    """Return the classes whose gradients were compared at the start of a run, and its kernels."""
    model = tiny_model("llama", **changes)
    model.model.norm.__class__ = norm or type(model.model.norm)
    model = with_adapters(model, r=rank)
    before = len(timeline.spans)
    install_fused_kernels(model, CONFIG, process, proofs=ProofStore(folder, environ or {}))
    words = [span.name.split() for span in timeline.spans[before:]]
    proved = {name for first, _, name, *_ in words if first == "proof"}
    return proved, fused_kernels_of(model)


@pytest.fixture(scope="module")
def first_start(tmp_path_factory):
    """The folder of one record, and what is fused. Not to change."""
    folder = tmp_path_factory.mktemp("proofs")
    classes, kernels = start(folder)
    assert classes == ALL
    return folder, kernels


@pytest.fixture
def proved(first_start, tmp_path):
    """A copy of the folder of one record, and what is fused."""
    folder, kernels = first_start
    return shutil.copytree(folder, tmp_path, dirs_exist_ok=True), kernels


@pytest.fixture(autouse=True)
def versions_read_again():
    """Leave nothing of a change to other tests."""
    yield
    counting.counting_versions.cache_clear()


def test_the_second_start_compares_outputs_alone_and_says_so(proved, caplog):
    folder, kernels = proved
    (path,) = folder.iterdir()
    facts = json.loads(path.read_text())
    assert 0 < max(facts["proofs"].values()) < 1e-4
    written = path.read_bytes()
    with caplog.at_level(logging.INFO):
        assert start(folder) == (set(), kernels)
    (line,) = [line for line in caplog.messages if "are taken" in line]
    assert f"5 proofs of {facts['when']}" in line and str(path) in line
    assert path.read_bytes() == written


def test_other_weights_in_another_place_are_proved_by_their_class(proved):
    assert start(proved[0], name_or_path="elsewhere") == (set(), proved[1])


@pytest.mark.parametrize(
    "changes",
    [{"rank": 8}, {"intermediate_size": 96}, {"rms_norm_eps": 1e-4}, long({"rope_theta": 5e4})],
    ids=str,
)
def test_another_shape_or_setting_of_the_layers_is_proved(proved, changes):
    assert start(proved[0], **changes)[0] == ALL
    assert start(proved[0], **changes)[0] == set()


def test_another_number_type_is_proved(proved):
    process = Process.alone(torch.device("cpu"), torch.bfloat16)
    assert start(proved[0], process=process)[0] == ALL


def test_a_variable_that_may_choose_other_kernels_is_part_of_the_proof(proved):
    folder = proved[0]
    assert start(folder, {"TRITON_F32_DEFAULT": "ieee"})[0] == ALL
    assert start(folder, {"HOME": "/elsewhere", "TORCHELASTIC_RUN_ID": "7"})[0] == set()


def change_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder / "cpuinfo"
    other.write_text("processor\t: 0\nmodel name\t: Another\ncpu MHz\t: 2000\n")
    monkeypatch.setattr(proofs_module, "CPUS", other)


def change_version(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = counting.metadata.version
    monkeypatch.setattr(
        counting.metadata, "version", lambda name: "9.9" if name == "triton" else version(name)
    )
    counting.counting_versions.cache_clear()


def change_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a line to a copy of the sources of a kernel, and let the copy be the package."""
    before = counting.counting_versions()
    root = counting.PACKAGE.parent
    for name in ("sft_play/models", "sft_kernels"):
        shutil.copytree(root / name, folder / name)
    monkeypatch.setattr(counting, "PACKAGE", folder / "sft_play")
    counting.counting_versions.cache_clear()
    assert counting.counting_versions() == before
    with (folder / "sft_kernels/linears/glu.py").open("a") as file:
        file.write("# changed\n")
    counting.counting_versions.cache_clear()


@pytest.mark.parametrize("change", [change_device, change_version, change_code])
def test_the_record_of_another_device_version_or_source_is_not_taken(
    proved, change, monkeypatch, tmp_path_factory, caplog
):
    change(tmp_path_factory.mktemp("changed"), monkeypatch)
    assert start(proved[0]) == (ALL, proved[1])
    assert not [line for line in caplog.messages if "not taken" in line]


def test_the_source_of_a_class_is_part_of_the_proof_also_below_a_class_that_fsdp_makes(
    tmp_path, monkeypatch
):
    source = tmp_path / "own_norm.py"
    code = "from transformers.models.llama.modeling_llama import LlamaRMSNorm\n"
    source.write_text(code + "class OwnNorm(LlamaRMSNorm):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    norm = type("FSDPOwnNorm", (importlib.import_module("own_norm").OwnNorm,), {})
    proofs = tmp_path / "proofs"
    assert [start(proofs, norm=norm)[0] for _ in range(2)] == [ALL, set()]
    source.write_text(source.read_text() + "# changed\n")
    assert start(proofs, norm=norm)[0] == ALL


def changed_value(path: Path) -> None:
    facts = json.loads(path.read_text())
    facts["proofs"] = dict.fromkeys(facts["proofs"], 0.0)
    path.write_text(json.dumps(facts))


def made_for_another(path: Path) -> None:
    """Give the name of this record to one that is whole, and of another model."""
    start(path.parent, hidden_act="gelu_pytorch_tanh")
    (other,) = set(path.parent.iterdir()) - {path}
    other.rename(path)


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "full").touch()


def of_another_user(path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root")
    os.chown(path, 12345, -1)


WRITTEN = "it is not as it was written here"
MODE = "another user may have written it"


@pytest.mark.parametrize(
    "damage, reason",
    [
        (changed_value, WRITTEN),
        (made_for_another, WRITTEN),
        long(lambda path: path.write_text("[1]"), "not taken"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "Unterminated"),
        (lambda path: path.write_bytes(b"\xff"), "decode"),
        (unreadable, "Is a directory"),
        long(lambda path: path.chmod(0o620), MODE),
        (lambda path: path.chmod(0o602), MODE),
        (of_another_user, MODE),
    ],
)
def test_a_forged_or_damaged_record_is_not_taken_and_the_log_says_why(
    proved, damage, reason, caplog
):
    folder, kernels = proved
    (path,) = folder.iterdir()
    damage(path)
    caplog.clear()
    assert start(folder) == (ALL, kernels)
    (line,) = [line for line in caplog.messages if "not taken" in line]
    assert str(path) in line and reason in line
    if path.is_file():  # and is written again
        assert start(folder)[0] == set()


def test_a_record_that_its_umask_lets_others_write_is_closed_to_them(tmp_path):
    before = os.umask(0)
    try:
        start(tmp_path)
    finally:
        os.umask(before)
    assert start(tmp_path)[0] == set()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    assert start(tmp_path / "file" / "proofs")[0] == ALL
    assert "the next start proves the kernels again" in caplog.messages[-1]


def scale_output(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlp.lora_mlp
    monkeypatch.setattr(mlp, "lora_mlp", lambda *args, **named: 1.01 * right(*args, **named))


def scale_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mlp.glu_backward

    def wrong(dh, gate, up, activation, dgate, dup, **settings):
        right(dh, gate, up, activation, dgate, dup, **settings)
        dgate.mul_(1.01)
        dup.mul_(1.01)

    monkeypatch.setattr(mlp, "glu_backward", wrong)


@pytest.mark.parametrize("mutate", [scale_output, scale_gradients])
def test_what_is_refused_leaves_no_record_and_is_refused_again(tmp_path, mutate):
    with pytest.MonkeyPatch.context() as changed:
        mutate(changed)
        for classes in (ALL, {"LlamaMLP"}):
            proved, kernels = start(tmp_path)
            assert proved == classes
            assert "LlamaMLP computes something else" in kernels.off["mlp"]
        (path,) = tmp_path.iterdir()
        assert "LlamaMLP" not in path.read_text()
    proved, kernels = start(tmp_path)
    assert proved == {"LlamaMLP"} and "mlp" in kernels.on
    assert start(tmp_path) == (set(), kernels)


def test_a_kernel_that_is_changed_in_memory_is_found_by_its_outputs(proved, monkeypatch, caplog):
    folder, right = proved
    scale_output(monkeypatch)
    classes, kernels = start(folder)
    assert classes == {"LlamaMLP", "LlamaDecoderLayer"}  # nothing after it is believed
    assert "LlamaMLP computes something else (output by" in kernels.off["mlp"]
    assert [line for line in caplog.messages if "proved again" in line and "LlamaMLP" in line]
    monkeypatch.undo()
    assert start(folder)[1] == right


def test_wrong_gradients_of_a_changed_source_are_found_in_spite_of_a_record(
    proved, monkeypatch, tmp_path_factory
):
    scale_gradients(monkeypatch)
    change_code(tmp_path_factory.mktemp("changed"), monkeypatch)
    classes, kernels = start(proved[0])
    assert classes == ALL and "LlamaMLP computes something else (gradient" in kernels.off["mlp"]


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next"])
def test_a_model_of_many_kinds_is_fused_the_same_with_a_record(tmp_path, model_type):
    fused = []
    for _ in range(3):
        model = tiny_model(model_type).train()
        fused.append(install_fused_kernels(model, CONFIG, ALONE, proofs=ProofStore(tmp_path, {})))
    assert fused[0] == fused[1] == fused[2]


def be_rank(folder: Path) -> int:
    """Start as one of two ranks: with no record, with one, and with one that rank 1 lacks."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    process = Process(rank, rank, 2, torch.device("cpu"), timeout=timedelta(seconds=60))
    found = []
    for environ in ({}, {}, {"TRITON_X": "1"} if rank else {}):
        distributed.barrier()  # the record is written
        found.append(start(folder, environ, process)[0])
    return int(found != [ALL, set(), ALL])


def test_all_ranks_take_a_record_or_none(tmp_path):
    assert run_two(be_rank, tmp_path, output=tmp_path / "output.txt") == [0, 0], (
        tmp_path / "output.txt"
    ).read_text()


def test_a_second_run_takes_the_proofs_of_the_first_and_trains_the_same(
    plan_run, run_worker, losses_of, tmp_path
):
    folders = [plan_run({"data.cache_dir": tmp_path}) for _ in range(2)]
    for folder in folders:
        assert run_worker(folder) == 0
    logs = [(folder.path / "logs" / "rank-0.log").read_text() for folder in folders]
    assert ["are taken, largest difference" in log for log in logs] == [False, True]
    assert losses_of(folders[0]) == losses_of(folders[1])
