"""The DeepSpeed JSON: comments, names, and numbers that agree with the run."""

import ast
import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from sft_play.config import deepspeed, deepspeed_keys
from sft_play.config.loader import CONFIGS
from sft_play.config.yaml_source import read_commented_json
from sft_play.errors import ConfigError

PRINTED = Path(__file__).parent / "fixtures" / "printed_configs" / "deepspeed_custom.json"
RUN = deepspeed.DeepSpeedRun(
    micro_batch=4, grad_accum=2, world_size=4, bf16=True, fp16=False, max_grad_norm=1.0
)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('// a\n{"a": 1, /* b\n */ "c": [1, 2.5, -1e3,],} // d', {"a": 1, "c": [1, 2.5, -1000.0]}),
        ('{"a": "http://x /* y */, \\"//\\" ,}"}', {"a": 'http://x /* y */, "//" ,}'}),
        ('\ufeff{"a": [true, false, null, {}, []]}', {"a": [True, False, None, {}, []]}),
        ('{"a":"x\\/y",\n\t"b":\t{"c":\t1}}', {"a": "x/y", "b": {"c": 1}}),
        ("/**/3//", 3),
        ('{"a": 5e8}', {"a": 5e8}),
    ],
)
def test_json_with_comments_and_trailing_commas_is_read(folder, text, value):
    (folder / "a.json").write_text(text, encoding="utf-8")
    assert read_commented_json(Path("a.json")).value == value


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1,\n "a": 2}', "a.json:2:2: key 'a'"),
        ('{"x": {"a": 1, "a": 1}}', "a.json:1:16: key 'a'"),
        ('{"a" 1}', "a.json:1:6: "),
        ('/*\n*/{"a": True}', "a.json:2:9: "),
        ('{"a": NaN}', "a.json: NaN"),
        ('{"a": "x\ny"}', "a.json:1:9: "),
        ("{} /* x", "a.json:1:4: "),
        ("", "a.json:1:1: "),
        ("[" * 100000, "a.json: nested"),
    ],
)
def test_broken_json_is_refused_with_line_and_column(folder, text, place):
    (folder / "a.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_commented_json(Path("a.json"))
    assert str(error.value).startswith(place)


def test_the_printed_json_is_read_and_resolved():
    raw = deepspeed.read_deepspeed_json(PRINTED)
    assert (deepspeed.zero_stage(raw), deepspeed.offloads(raw), deepspeed.json_precision(raw)) == (
        3,
        (True, True),
        "bf16",
    )
    before = copy.deepcopy(raw)
    resolved = deepspeed.resolve_deepspeed(raw, RUN)
    assert (
        resolved
        == deepspeed.resolve_deepspeed(resolved, RUN)
        == {
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
    )
    assert raw == before


@pytest.mark.parametrize(
    ("name", "stage"), [("deepspeed_zero2.json", 2), ("deepspeed_zero3.json", 3)]
)
def test_a_json_that_ships_fits_every_precision(name, stage):
    raw = deepspeed.read_deepspeed_json(CONFIGS / name)
    assert (deepspeed.zero_stage(raw), deepspeed.offloads(raw), deepspeed.json_precision(raw)) == (
        stage,
        (False, False),
        None,
    )
    for bf16, fp16 in ((True, False), (False, True), (False, False)):
        resolved = deepspeed.resolve_deepspeed(raw, replace(RUN, bf16=bf16, fp16=fp16))
        assert (resolved["bf16"]["enabled"], resolved["fp16"]["enabled"]) == (bf16, fp16)
        assert '"auto"' not in str(resolved).replace("'", '"')
        assert deepspeed.resolve_deepspeed(resolved, replace(RUN, bf16=bf16, fp16=fp16)) == resolved


def test_a_json_without_batch_keys_gets_all_three():
    resolved = deepspeed.resolve_deepspeed({}, RUN)
    assert (
        resolved["train_micro_batch_size_per_gpu"],
        resolved["gradient_accumulation_steps"],
        resolved["train_batch_size"],
    ) == (4, 2, 32)
    assert resolved["zero_optimization"] == {"stage": 0}


def test_cpu_offload_takes_parameters_at_stage_3_only():
    offload = {"device": "cpu", "pin_memory": True}
    zero = deepspeed.resolve_deepspeed(
        {"zero_optimization": {"stage": 2, "cpu_offload": True}}, RUN
    )["zero_optimization"]
    assert zero == {"stage": 2, "offload_optimizer": offload}
    zero = deepspeed.resolve_deepspeed(
        {"zero_optimization": {"stage": 2, "cpu_offload": False}}, RUN
    )["zero_optimization"]
    assert zero == {"stage": 2}
    zero = {"stage": 3, "cpu_offload_param": True, "cpu_offload_use_pin_memory": False}
    assert deepspeed.resolve_deepspeed({"zero_optimization": zero}, RUN)["zero_optimization"][
        "offload_param"
    ] == {"device": "cpu", "pin_memory": False}


def test_buffer_sizes_follow_the_model_or_deepspeeds_defaults():
    names = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    raw = {"zero_optimization": {"stage": 3, **dict.fromkeys(names, "auto")}}
    sized = deepspeed.resolve_deepspeed(raw, replace(RUN, hidden_size=4096))["zero_optimization"]
    assert [sized[name] for name in names] == [16_777_216, 15_099_494, 40_960]
    sized = deepspeed.resolve_deepspeed(raw, RUN)["zero_optimization"]
    assert [sized[name] for name in names] == [500_000_000, 50_000_000, 100_000]


def test_the_old_name_of_bf16_is_read():
    resolved = deepspeed.resolve_deepspeed(
        {"bfloat16": {"enabled": "auto", "check_grad_overflow": False}}, RUN
    )
    assert resolved["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert "bfloat16" not in resolved


@pytest.mark.parametrize(
    ("raw", "facts"),
    [
        ({"train_batch_size": 64}, "train_batch_size=64 4 2 32 TRAIN_GRAD_ACCUM=4"),
        ({"train_batch_size": 33}, "train_batch_size=33 4 2 32"),
        (
            {"train_micro_batch_size_per_gpu": 8},
            "train_micro_batch_size_per_gpu=8 train.batch_size=4 TRAIN_BATCH_SIZE=8",
        ),
        (
            {"gradient_accumulation_steps": 1},
            "gradient_accumulation_steps=1 train.grad_accum=2 TRAIN_GRAD_ACCUM=1",
        ),
        (
            {"gradient_clipping": 0.5},
            "gradient_clipping=0.5 train.max_grad_norm=1.0 TRAIN_MAX_GRAD_NORM=0.5",
        ),
        ({"bf16": {"enabled": False}}, "bf16.enabled=false train.bf16=true TRAIN_BF16=false"),
        ({"fp16": {"enabled": True}}, "fp16.enabled=true train.fp16=false TRAIN_FP16=true"),
    ],
)
def test_a_contradiction_shows_both_sides(raw, facts):
    with pytest.raises(ConfigError) as error:
        deepspeed.resolve_deepspeed(raw, RUN, source="a.json")
    assert all(fact in str(error.value) for fact in ["a.json: ", '"auto"', *facts.split()])


BAD_JSON = [
    ('{"train_bach_size": 1}', ":1:2: train_bach_size train_batch_size?"),
    ('{"stage": 3}', ":1:2: stage zero_optimization"),
    ('{"qqqq": 3}', ":1:2: qqqq delete"),
    ('{"zero_optimization": {\n "stag": 3}}', ":2:2: zero_optimization.stag stage?"),
    ('{"zero_optimization": {"train_batch_size": 3}}', "top level"),
    (
        '{"zero_optimization": {"stage": 3, "offload_param": {"devise": "cpu"}}}',
        "zero_optimization.offload_param.devise device?",
    ),
    ('{"data_types": {"grad_accum_type": "fp32"}}', "grad_accum_dtype?"),
    ('{"optimizer": {"type": "AdamW"}}', "train.optim, train.learning_rate train.weight_decay"),
    ('{"scheduler": {}}', "scheduler: train.lr_scheduler_type train.warmup_steps"),
    ('{"amp": {}}', "amp: 0.19 delete"),
    ('{"zero_optimization": {"mics_shard_size": 2}}', "zero_optimization.mics_shard_size: 0.19"),
    ('{"sequence_parallel_size": 2}', "train.context_parallel"),
    ('{"zero_optimization": true}', 'zero_optimization=true {"stage": 2}'),
    ('{"bf16": true}', 'bf16=true {"enabled": "auto"}'),
    ('{"zero_optimization": {"stage": 4}}', "zero_optimization.stage=4 0, 1, 2 3"),
    ('{"zero_optimization": {"stage": "3"}}', "zero_optimization.stage=3"),
    ('{"zero_optimization": {"stage": true}}', "zero_optimization.stage=true"),
    ('{"train_batch_size": "32"}', 'train_batch_size=32 "auto"'),
    ('{"gradient_clipping": 1e999}', "gradient_clipping=inf"),
    ('{"gradient_clipping": -1}', "gradient_clipping=-1"),
    ('{"bf16": {"enabled": "yes"}}', 'bf16.enabled=yes true, false "auto"'),
    (
        '{"bf16": {"enabled": true}, "fp16": {"enabled": true}}',
        "fp16.enabled=true bf16.enabled=true",
    ),
    ('{"steps_per_print": "auto"}', 'steps_per_print="auto"'),
    (
        '{"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false}}',
        "stage3_gather_16bit_weights_on_model_save=false",
    ),
    (
        '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}',
        "device=cpu stage 3 stage 2",
    ),
    (
        '{"zero_optimization": {"stage": 1, "cpu_offload_param": true}}',
        "cpu_offload_param=true stage 3 stage 1",
    ),
    ('{"zero_optimization": {"cpu_offload": true}}', "cpu_offload=true stage 1 stage 0"),
    ('{"zero_optimization": {"stage": 2, "cpu_offload": "yes"}}', "cpu_offload=yes"),
    (
        '{"zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {}}}',
        "keep offload_optimizer",
    ),
    (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}}',
        "device=disk none, cpu nvme",
    ),
    (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}',
        'device=nvme "nvme_path"',
    ),
    (
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}',
        'zero_optimization.reduce_bucket_size=big 1, "auto"',
    ),
    (
        '{"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": null}}',
        "stage3_max_reuse_distance=null 0",
    ),
    ('{"zero_optimization": {"stage": 2, "overlap_comm": "yes"}}', "overlap_comm=yes true false"),
    ("[1]", ":1: [1]"),
]


@pytest.mark.parametrize(("text", "facts"), BAD_JSON)
def test_bad_json_values_are_refused_with_their_place(folder, text, facts):
    (folder / "a.json").write_text(text)
    with pytest.raises(ConfigError) as error:
        deepspeed.read_deepspeed_json("a.json")
    (line,) = str(error.value).splitlines()
    assert line.startswith("a.json:") and all(fact in line for fact in facts.split()), line


def test_switches_and_numbers_are_keys_that_are_known():
    for path in deepspeed_keys.SWITCHES | deepspeed_keys.WHOLE_NUMBERS.keys():
        section, _, key = path.rpartition(".")
        assert key in deepspeed_keys.SECTIONS[section]


def test_a_missing_json_is_refused_with_the_nearest():
    path = CONFIGS / "deepspeed_zero4.json"
    with pytest.raises(ConfigError, match=f"DEEPSPEED_CONFIG={path}: .*deepspeed_zero[23].json"):
        deepspeed.read_deepspeed_json(path)


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


@pytest.mark.parametrize(
    ("file", "name", "keys"),
    [
        ("zero/config.py", "DeepSpeedZeroConfig", deepspeed_keys.ZERO_KEYS),
        (
            "zero/offload_config.py",
            "DeepSpeedZeroOffloadOptimizerConfig",
            deepspeed_keys.OFFLOAD_OPTIMIZER_KEYS,
        ),
        (
            "zero/offload_config.py",
            "DeepSpeedZeroOffloadParamConfig",
            deepspeed_keys.OFFLOAD_PARAM_KEYS,
        ),
        ("precision_config.py", "DeepSpeedBF16Config", deepspeed_keys.BF16_KEYS),
        ("precision_config.py", "DeepSpeedFP16Config", deepspeed_keys.FP16_KEYS),
    ],
)
def test_the_keys_of_each_object_are_the_installed_deepspeeds(source, file, name, keys):
    assert fields(source / "runtime" / file, name) == keys


def test_every_top_level_key_is_a_word_of_the_installed_deepspeed(source):
    files = """
        runtime/config.py runtime/constants.py runtime/precision_config.py
        runtime/activation_checkpointing/config.py runtime/swap_tensor/constants.py
        runtime/data_pipeline/constants.py runtime/tensor_parallel/config.py comm/config.py
        monitor/config.py profiling/constants.py autotuning/constants.py datastates/config.py
        utils/config.py
    """.split()
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
