"""The DeepSpeed JSON: comments, names, and numbers that agree with the run."""

import ast
import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config import deepspeed, deepspeed_keys
from sft_play.config.loader import CONFIGS
from sft_play.config.yaml_source import read_json
from sft_play.errors import ConfigError

PRINTED = Path(__file__).parent / "fixtures" / "printed_configs" / "deepspeed_custom.json"
RUN = deepspeed.DeepSpeedRun(
    micro_batch=4, grad_accum=2, world_size=4, bf16=True, fp16=False, max_grad_norm=1.0
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('// a\n{"a": 1, /* b\n */ "c": [1, 2.5, -1e3,],} // d', {"a": 1, "c": [1, 2.5, -1000.0]}),
        ('{"a": "http://x /* y */, \\"//\\" ,}"}', {"a": 'http://x /* y */, "//" ,}'}),
        ('\ufeff{"a": [true, false, null, {}, []]}', {"a": [True, False, None, {}, []]}),
        ('{"a":\r\n"\\u00e9\\n"}', {"a": "é\n"}),
        ('{"a":"x\\/y",\n\t"b":\t{"c":\t1}}', {"a": "x/y", "b": {"c": 1}}),
        ("/**/3//", 3),
        ('{"a": 5e8}', {"a": 5e8}),
    ],
)
def test_json_with_comments_and_trailing_commas_is_read(
    folder: Path, text: str, value: object
) -> None:
    (folder / "a.json").write_text(text, encoding="utf-8")
    assert read_json(Path("a.json")).value == value


def test_every_key_knows_its_place(folder: Path) -> None:
    (folder / "a.json").write_text('{\n  "a": /*\n*/ {"b": 1},\n\t"c": [{"d": 2}]\n}')
    assert read_json(Path("a.json")).origins == {
        "a": "a.json:2:3",
        "a.b": "a.json:3:5",
        "c": "a.json:4:2",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a": 1,\n "a": 2}',
            "a.json:2:2: key 'a' is given twice, first on line 1; keep one of them",
        ),
        ('{"x": {"a": 1, "a": 1}}', "a.json:1:16: key 'a' is given twice, first on line 1"),
        ('{"a" 1}', "a.json:1:6: not valid JSON: Expecting ':' delimiter"),
        ("{'a': 1}", "a.json:1:2: not valid JSON: Expecting property name enclosed in double quot"),
        ("{a: 1}", "a.json:1:2: not valid JSON: Expecting property name enclosed in double quotes"),
        ('/*\n*/{"a": True}', "a.json:2:9: not valid JSON: Expecting value"),
        ('{"a": NaN}', "a.json: NaN is no JSON value; write a finite number, or null"),
        ('{"a": 01}', "a.json:1:8: not valid JSON: Expecting ',' delimiter"),
        ('{"a": 1\n "b": 2}', "a.json:2:2: not valid JSON: Expecting ',' delimiter"),
        ('{"a": 1,, "b": 2}', "a.json:1:9: not valid JSON: Expecting property name"),
        ('\n {"a": [1', "a.json:2:10: not valid JSON: Expecting ',' delimiter"),
        ('{"a": "x', "a.json:1:7: not valid JSON: Unterminated string"),
        ('{"a": "x\ny"}', "a.json:1:9: not valid JSON: Invalid control character"),
        ("{} /* x", "a.json:1:4: not valid JSON: Extra data"),
        ("", "a.json:1:1: not valid JSON: Expecting value"),
        ("{} {}", "a.json:1:4: not valid JSON: Extra data"),
        ("[" * 100000, "a.json: nested too deeply to read"),
    ],
)
def test_broken_json_is_refused_with_line_and_column(folder: Path, text: str, message: str) -> None:
    (folder / "a.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_json(Path("a.json"))
    assert str(error.value).startswith(message)


def test_the_printed_json_is_read_and_resolved() -> None:
    raw = deepspeed.read(PRINTED)
    assert (deepspeed.zero_stage(raw), deepspeed.offloads(raw), deepspeed.precision(raw)) == (
        3,
        (True, True),
        "bf16",
    )
    before = copy.deepcopy(raw)
    assert deepspeed.resolve(raw, RUN) == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "train_batch_size": 32,
        "gradient_clipping": 1.0,
    }
    assert raw == before


@pytest.mark.parametrize(
    ("name", "stage"), [("deepspeed_zero2.json", 2), ("deepspeed_zero3.json", 3)]
)
def test_a_json_that_ships_fits_every_precision(name: str, stage: int) -> None:
    raw = deepspeed.read(CONFIGS / name)
    assert (deepspeed.zero_stage(raw), deepspeed.offloads(raw), deepspeed.precision(raw)) == (
        stage,
        (False, False),
        None,
    )
    for bf16, fp16 in ((True, False), (False, True), (False, False)):
        resolved = deepspeed.resolve(raw, replace(RUN, bf16=bf16, fp16=fp16))
        assert (resolved["bf16"]["enabled"], resolved["fp16"]["enabled"]) == (bf16, fp16)
        assert '"auto"' not in str(resolved).replace("'", '"')
        assert deepspeed.resolve(resolved, replace(RUN, bf16=bf16, fp16=fp16)) == resolved


def test_a_json_without_batch_keys_gets_all_three() -> None:
    resolved = deepspeed.resolve({}, RUN)
    assert (
        resolved["train_micro_batch_size_per_gpu"],
        resolved["gradient_accumulation_steps"],
        resolved["train_batch_size"],
    ) == (4, 2, 32)
    assert resolved["zero_optimization"] == {"stage": 0}


def test_numbers_that_agree_with_the_run_stay() -> None:
    raw = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1,
        "bf16": {"enabled": True},
    }
    assert deepspeed.resolve(raw, RUN)["train_batch_size"] == 32


def test_cpu_offload_takes_parameters_at_stage_3_only() -> None:
    offload = {"device": "cpu", "pin_memory": True}
    zero = deepspeed.resolve({"zero_optimization": {"stage": 2, "cpu_offload": True}}, RUN)[
        "zero_optimization"
    ]
    assert zero == {"stage": 2, "offload_optimizer": offload}
    zero = deepspeed.resolve({"zero_optimization": {"stage": 2, "cpu_offload": False}}, RUN)[
        "zero_optimization"
    ]
    assert zero == {"stage": 2}
    zero = {"stage": 3, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    assert deepspeed.resolve({"zero_optimization": zero}, RUN)["zero_optimization"][
        "offload_param"
    ] == {"device": "cpu", "pin_memory": False}


def test_buffer_sizes_follow_the_model_or_deepspeeds_defaults() -> None:
    names = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    raw = {"zero_optimization": {"stage": 3, **dict.fromkeys(names, "auto")}}
    sized = deepspeed.resolve(raw, replace(RUN, hidden_size=4096))["zero_optimization"]
    assert [sized[name] for name in names] == [16_777_216, 15_099_494, 40_960]
    sized = deepspeed.resolve(raw, RUN)["zero_optimization"]
    assert [sized[name] for name in names] == [500_000_000, 50_000_000, 100_000]


def test_the_old_name_of_bf16_is_read() -> None:
    resolved = deepspeed.resolve(
        {"bfloat16": {"enabled": "auto", "check_grad_overflow": False}}, RUN
    )
    assert resolved["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert "bfloat16" not in resolved


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"train_batch_size": 64},
            "train_batch_size=64, but 4 rows x 2 accumulation steps x 4 processes = 32; write "
            '"auto" or 32, or TRAIN_GRAD_ACCUM=4',
        ),
        (
            {"train_batch_size": 33},
            "train_batch_size=33, but 4 rows x 2 accumulation steps x 4 processes = 32; write "
            '"auto" or 32',
        ),
        (
            {"train_micro_batch_size_per_gpu": 8},
            'train_micro_batch_size_per_gpu=8, but train.batch_size=4 in this run; write "auto", '
            "or TRAIN_BATCH_SIZE=8",
        ),
        (
            {"gradient_accumulation_steps": 1},
            'gradient_accumulation_steps=1, but train.grad_accum=2 in this run; write "auto", or '
            "TRAIN_GRAD_ACCUM=1",
        ),
        (
            {"gradient_clipping": 0.5},
            'gradient_clipping=0.5, but train.max_grad_norm=1.0 in this run; write "auto", or '
            "TRAIN_MAX_GRAD_NORM=0.5",
        ),
        (
            {"bf16": {"enabled": False}},
            'bf16.enabled=false, but train.bf16=true in this run; write "auto", or '
            "TRAIN_BF16=false",
        ),
        (
            {"fp16": {"enabled": True}},
            'fp16.enabled=true, but train.fp16=false in this run; write "auto", or TRAIN_FP16=true',
        ),
    ],
)
def test_a_contradiction_shows_both_sides(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        deepspeed.resolve(raw, RUN, source="a.json")
    assert str(error.value) == f"a.json: {message}"


def test_all_contradictions_come_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        deepspeed.resolve(
            {"train_batch_size": 64, "fp16": {"enabled": True}, "gradient_clipping": 0.0}, RUN
        )
    assert len(str(error.value).splitlines()) == 3


def test_one_of_one_is_counted_in_the_singular() -> None:
    with pytest.raises(ConfigError, match="1 row x 1 accumulation step x 1 process = 1"):
        deepspeed.resolve(
            {"train_batch_size": 64}, replace(RUN, micro_batch=1, grad_accum=1, world_size=1)
        )


BAD_JSON = [
    (
        '{"train_bach_size": 1}',
        ":1:2: train_bach_size: DeepSpeed has no such key; did you mean train_batch_size?",
    ),
    ('{"stage": 3}', ":1:2: stage: DeepSpeed has no such key; it belongs into zero_optimization"),
    ('{"qqqq": 3}', ":1:2: qqqq: DeepSpeed has no such key; delete it"),
    (
        '{"zero_optimization": {\n "stag": 3}}',
        ":2:2: zero_optimization.stag: DeepSpeed has no such key; did you mean stage?",
    ),
    (
        '{"zero_optimization": {"train_batch_size": 3}}',
        "DeepSpeed has no such key; it belongs to the top level",
    ),
    (
        '{"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}}',
        "zero_optimization.offload_param.devise: DeepSpeed has no such key; did you mean device?",
    ),
    ('{"data_types": {"grad_accum_type": "fp32"}}', "did you mean grad_accum_dtype?"),
    (
        '{"optimizer": {"type": "AdamW"}}',
        "optimizer: the optimizer is the config's: delete it and set train.optim, "
        "train.learning_rate and train.weight_decay",
    ),
    (
        '{"scheduler": {}}',
        "scheduler: the schedule is the config's: delete it and set train.lr_scheduler_type and "
        "train.warmup_steps",
    ),
    ('{"amp": {}}', "amp: DeepSpeed 0.19 has removed it; delete it"),
    (
        '{"zero_optimization": {"mics_shard_size": 2}}',
        "zero_optimization.mics_shard_size: DeepSpeed 0.19 has removed it; delete it",
    ),
    ('{"sequence_parallel_size": 2}', "delete it and set train.context_parallel"),
    (
        '{"zero_optimization": true}',
        'zero_optimization=true is not valid; write an object, such as {"stage": 2}',
    ),
    ('{"bf16": true}', 'bf16=true is not valid; write an object, such as {"enabled": "auto"}'),
    (
        '{"zero_optimization": {"stage": 4}}',
        "zero_optimization.stage=4 is not valid; write 0, 1, 2 or 3",
    ),
    (
        '{"zero_optimization": {"stage": "3"}}',
        "zero_optimization.stage=3 is not valid; write 0, 1, 2 or 3",
    ),
    (
        '{"zero_optimization": {"stage": true}}',
        "zero_optimization.stage=true is not valid; write 0, 1, 2 or 3",
    ),
    (
        '{"train_batch_size": "32"}',
        'train_batch_size=32 is not valid; write a whole number of at least 1, or "auto"',
    ),
    ('{"train_batch_size": 0}', "train_batch_size=0 is not valid"),
    ('{"gradient_clipping": 1e999}', "gradient_clipping=inf is not valid"),
    ('{"gradient_accumulation_steps": true}', "gradient_accumulation_steps=true is not valid"),
    (
        '{"gradient_clipping": -1}',
        'gradient_clipping=-1 is not valid; write a number of at least 0, or "auto"',
    ),
    ('{"bf16": {"enabled": "yes"}}', 'bf16.enabled=yes is not valid; write true, false or "auto"'),
    (
        '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}',
        "fp16.enabled=true beside bf16.enabled=true; keep one of them",
    ),
    (
        '{"steps_per_print": "auto"}',
        'steps_per_print="auto" has nothing to be taken from; write a value, or delete it',
    ),
    (
        '{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false}}',
        "=false would save one process's part of the weights",
    ),
    (
        '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
        "device=cpu needs ZeRO stage 3 or more, and this is stage 2",
    ),
    (
        '{"zero_optimization": {"stage": 1, "cpu_offload_param": true}}',
        "cpu_offload_param=true needs ZeRO stage 3 or more, and this is stage 1",
    ),
    (
        '{"zero_optimization": {"cpu_offload": true}}',
        "cpu_offload=true needs ZeRO stage 1 or more, and this is stage 0",
    ),
    (
        '{"zero_optimization": {"stage": 2, "cpu_offload": "yes"}}',
        "cpu_offload=yes is not valid; write true or false",
    ),
    (
        '{"zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {}}}',
        "keep offload_optimizer",
    ),
    (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}',
        "device=disk is not valid; write none, cpu or nvme",
    ),
    (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
        'device=nvme needs a folder; write "nvme_path" beside it',
    ),
    (
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}',
        "zero_optimization.reduce_bucket_size=big is not valid; write a whole number of at least "
        '1, or "auto"',
    ),
    (
        '{"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": null}}',
        "stage3_max_reuse_distance=null is not valid; write a whole number of at least 0",
    ),
    ('{"zero_optimization": {"sub_group_size": 1.5}}', "sub_group_size=1.5 is not valid"),
    (
        '{"zero_optimization": {"stage": 2, "overlap_comm": "yes"}}',
        "zero_optimization.overlap_comm=yes is not valid; write true or false",
    ),
    ('{"wall_clock_breakdown": 1}', "wall_clock_breakdown=1 is not valid; write true or false"),
    ("[1]", ":1: a DeepSpeed config is an object in braces, not [1]"),
]


@pytest.mark.parametrize(("text", "message"), BAD_JSON)
def test_bad_json_values_are_refused_with_their_place(
    folder: Path, text: str, message: str
) -> None:
    (folder / "a.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        deepspeed.read("a.json")
    (line,) = str(error.value).splitlines()
    assert line.startswith("a.json:")
    assert message in line


def test_numbers_with_exponents_and_deepspeeds_own_nulls_are_read(folder: Path) -> None:
    text = '{"steps_per_print": null, "zero_optimization": {"reduce_bucket_size": 5e8}}'
    (folder / "a.json").write_text(text)
    assert deepspeed.read("a.json")["zero_optimization"]["reduce_bucket_size"] == 5e8


def test_switches_and_numbers_are_keys_that_are_known() -> None:
    for path in deepspeed_keys.SWITCHES | deepspeed_keys.WHOLE_NUMBERS.keys():
        section, _, key = path.rpartition(".")
        assert key in deepspeed_keys.SECTIONS[section]


def test_a_missing_json_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^DEEPSPEED_CONFIG=.*deepspeed_zero4.json: no such file; did you mean "
        r".*deepspeed_zero[23].json\?$",
    ):
        deepspeed.read(CONFIGS / "deepspeed_zero4.json")


@pytest.fixture(scope="module")
def source() -> Path:
    """The installed DeepSpeed's folder, read as text: importing it takes seconds."""
    found = importlib.util.find_spec("deepspeed")
    if found is None:
        pytest.skip("deepspeed is not installed")
    return Path(found.submodule_search_locations[0])


def fields(path: Path, name: str) -> set[str]:
    """The fields of a pydantic class and their aliases."""
    (found,) = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    names = set()
    for node in found.body:
        if isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
            keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
            names |= {keyword.value.value for keyword in keywords if keyword.arg == "alias"}
    return names


def test_the_keys_of_each_object_are_the_installed_deepspeeds(source: Path) -> None:
    runtime = source / "runtime"
    assert fields(runtime / "zero" / "config.py", "DeepSpeedZeroConfig") == deepspeed_keys.ZERO_KEYS
    assert (
        fields(runtime / "zero" / "offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig")
        == deepspeed_keys.OFFLOAD_OPTIMIZER_KEYS
    )
    assert (
        fields(runtime / "zero" / "offload_config.py", "DeepSpeedZeroOffloadParamConfig")
        == deepspeed_keys.OFFLOAD_PARAM_KEYS
    )
    assert (
        fields(runtime / "precision_config.py", "DeepSpeedBF16Config") == deepspeed_keys.BF16_KEYS
    )
    assert (
        fields(runtime / "precision_config.py", "DeepSpeedFP16Config") == deepspeed_keys.FP16_KEYS
    )


def test_every_top_level_key_is_a_word_of_the_installed_deepspeed(source: Path) -> None:
    files = [
        "runtime/config.py",
        "runtime/constants.py",
        "runtime/precision_config.py",
        "runtime/activation_checkpointing/config.py",
    ]
    files += [
        "runtime/swap_tensor/constants.py",
        "runtime/data_pipeline/constants.py",
        "runtime/tensor_parallel/config.py",
        "comm/config.py",
    ]
    files += [
        "monitor/config.py",
        "profiling/constants.py",
        "autotuning/constants.py",
        "datastates/config.py",
        "utils/config.py",
    ]
    words = {
        node.value
        for file in files
        for node in ast.walk(ast.parse((source / file).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert words >= deepspeed_keys.TOP_LEVEL_KEYS
    (removed, removed_zero) = [
        {key.value for key in node.value.keys}
        for node in ast.parse((source / "runtime" / "config.py").read_text()).body
        if isinstance(node, ast.Assign)
        and node.targets[0].id.startswith("_REMOVED_")
        and isinstance(node.value, ast.Dict)
    ]
    assert removed | {f"zero_optimization.{key}" for key in removed_zero} == deepspeed_keys.REMOVED
