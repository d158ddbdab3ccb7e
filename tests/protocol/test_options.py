"""The table of options: its rows, and every place that it feeds."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import pytest
from adapter_files import write_adapter
from hypothesis import given
from hypothesis import strategies as st

from quire.engine_core.arguments import load_options, parse_arguments
from quire.engine_core.decoding.single import SingleSequence
from quire.engine_core.scheduling.policies import POLICIES
from quire.engine_core.validation import RejectedError
from quire.frontend.cli.flags import AttachFlags, EngineFlags, EngineProcessFlags, HttpFlags, SamplingFlags
from quire.frontend.cli.info import option_reference
from quire.frontend.cli.simulate import ShapeFlags
from quire.frontend.engine_args import EngineArgs
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.openai.fields import RANGES, GenerationFields
from quire.frontend.sampling import validate
from quire.frontend.text.chat.answer_format import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES
from quire.frontend.text.chat.content_format import FormatName
from quire.frontend.vllm.options import ENGINE_OPTIONS
from quire.kernels import options as kernel_options
from quire.kernels.weights import quantization
from quire.protocol.engine_options import (
    ClientOptions,
    EngineOptions,
    EngineProcessOptions,
    HubOptions,
    SupervisionOptions,
)
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import (
    SAMPLING_LENGTHS,
    SAMPLING_RANGES,
    STRUCTURED_LENGTHS,
    EngineCoreRequest,
    SamplingParams,
    StructuredOutputs,
)
from quire.protocol.options import Option, Range, check_options, command_line, options_of, parse_size

TABLES = (EngineProcessOptions, HubOptions, SupervisionOptions, ClientOptions, SamplingParams, ServerArgs, EngineArgs)
REFERENCE = Path(__file__).parents[2] / "protocol" / "OPTIONS.md"
ENGINE = options_of(EngineOptions)
LIMITS = EngineShape(
    vocab_size=1000, max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=64, block_size=32, num_pages=500
)

# A value of each kind of option that is neither its default nor out of range.
OTHERS: dict[str, Any] = {"model": "m", "kv_cache_memory_bytes": 1 << 30, "num_pages": None}
OTHERS |= {"memory_limit": 8 << 30, "kv_disk_bytes": 1 << 40, "enable_prefix_caching": True}  # which kv_disk needs
OTHERS["kv_host_memory"] = 0
OTHERS["speculative_config"] = '{"method": "ngram"}'
OTHERS["kv_events_config"] = '{"topic": "kv"}'
OTHERS["lora_modules"] = ("tales=/adapters/tales",)
OTHERS["device"] = "cuda:1"
OTHERS["hf_overrides"] = '{"architectures": []}'


def other(option: Option) -> Any:
    if option.name in OTHERS:
        return OTHERS[option.name]
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    if option.type is bool:
        return not option.default
    if option.type is str:
        return "x"
    assert option.range is not None
    low = option.range.low + (not option.range.closed)
    return option.type(low if low != option.default else low + 1)


@pytest.mark.parametrize("table", TABLES)
def test_every_row_is_whole(table: type) -> None:
    for name, option in options_of(table).items():
        assert option.name == name
        assert option.help.endswith(".")
        assert option.section
        assert option.metavar or option.type is bool, name
        assert option.type in (bool, int, float, str), name
        if option.default not in (inspect.Parameter.empty, None, ()):
            option.check(option.default)


@pytest.mark.parametrize("table", TABLES)
def test_every_field_is_a_row(table: type) -> None:
    """Sampling parameters without a range or a flag need none."""
    names = set(inspect.signature(table).parameters)
    without = {
        "logit_bias", "allowed_token_ids", "bad_words_token_ids", "detokenize", "skip_special_tokens", "early_stopping",
        "spaces_between_special_tokens", "include_stop_str_in_output", "structured_outputs",
    }  # fmt: skip
    assert names - options_of(table).keys() == (without if table is SamplingParams else set())


def test_an_option_of_one_name_means_one_thing() -> None:
    """Of the same name in two tables are: the engine's listening address and a client's, and three seeds."""
    for name in options_of(EngineArgs).keys() & options_of(EngineProcessOptions).keys() - {"engine_address", "seed"}:
        ours, theirs = options_of(EngineArgs)[name], options_of(EngineProcessOptions)[name]
        assert (ours.help, ours.type, ours.range, ours.choices) == (
            theirs.help,
            theirs.type,
            theirs.range,
            theirs.choices,
        )


def test_the_engine_process_reads_what_python_writes(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", r=1)
    values = {name: other(option) for name, option in ENGINE.items()} | {"model": str(tmp_path), "num_pages": None}
    values["lora_modules"] = (f"a={adapter}", f"b={adapter}")
    args = EngineArgs.from_options(None, values)
    parsed = parse_arguments(command_line(args.settings()))
    assert {name: getattr(parsed, name) for name in ENGINE} == values
    defaults = parse_arguments(command_line(EngineArgs(model=str(tmp_path)).settings()))
    assert defaults == EngineProcessOptions(model=str(tmp_path))


def test_the_engine_process_has_every_option() -> None:
    values = {name: other(option) for name, option in options_of(EngineProcessOptions).items()}
    parsed = parse_arguments(command_line(values))
    assert {name: getattr(parsed, name) for name in values} == values


def test_the_model_is_loaded_with_the_same_names_and_defaults() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(kernel_options.LoadOptions)}
    process = options_of(EngineProcessOptions)
    own = {"isa", "kv_share"}  # the second follows from the others
    assert {*fields} - {*process} == own
    fields = {name: default for name, default in fields.items() if name not in own}
    assert fields.keys() - ENGINE.keys() == {"kv_memory_fd", "machine_share", "weights_fd"}
    assert {name for name in fields if process[name].default != fields[name]} == {
        "model",
        "max_loras",
        "kv_host_memory",
    }
    values = {name: other(process[name]) for name in fields}
    loaded = load_options(EngineProcessOptions(**values, enable_lora=True))
    assert {name: getattr(loaded, name) for name in values} == values


def test_lists_are_those_of_their_owners() -> None:
    assert ENGINE["quantization"].choices == quantization.NAMES
    assert ENGINE["scheduling_policy"].choices == tuple(POLICIES)
    for name in ("dtype", "kv_cache_dtype", "block_size"):
        assert ENGINE[name].choices == getattr(kernel_options, f"{name.upper()}S")
    assert {*options_of(ClientOptions)["tool_call_parser"].choices} == {"none", *TOOL_PARSER_NAMES}
    assert options_of(ClientOptions)["chat_template_content_format"].choices == get_args(FormatName)
    assert {*options_of(ClientOptions)["reasoning_parser"].choices} == {"none", *REASONING_PARSER_NAMES}
    for name, most in kernel_options.MOST.items():
        allowed = ENGINE[name].range
        assert allowed is not None
        assert (allowed.low, allowed.high) == (1, most) or name == "max_model_len"  # where the model's comes first


def test_the_wire_has_the_same_names() -> None:
    shape = {*EngineShape.__struct_fields__} - {
        "vocab_size",
        "hidden_size",
        "attention_context",
        "num_states",
        "pooling",
    }
    assert shape <= ENGINE.keys()
    assert {*ShapeFlags.rows} == shape - {"block_size"}


def test_no_option_of_ours_is_refused_as_one_of_vllm() -> None:
    assert not options_of(EngineArgs).keys() & ENGINE_OPTIONS.keys()


@pytest.mark.parametrize(
    ("flags", "tables"),
    [
        (EngineFlags, (EngineOptions, HubOptions, SupervisionOptions)),
        (AttachFlags, (ClientOptions,)),
        (EngineProcessFlags, (EngineProcessOptions, ClientOptions)),
        (HttpFlags, (ServerArgs, ClientOptions)),
        (SamplingFlags, (SamplingParams,)),
        (ShapeFlags, (EngineOptions,)),
    ],
)
def test_flags_are_rows(flags: Any, tables: tuple[type, ...]) -> None:
    rows = {name: row for table in reversed(tables) for name, row in options_of(table).items()}
    for parameter in flags.parameters():
        row = rows[parameter.name]
        typer_option = parameter.annotation.__metadata__[0]
        assert parameter.default is None
        assert typer_option.help.startswith(row.help)
        assert typer_option.default.split("/")[0] == row.flag  # the flag, in an annotation
    assert {*EngineFlags.rows} == {*ENGINE, *options_of(HubOptions), *options_of(SupervisionOptions)}
    assert {*ServerArgs.__dataclass_fields__} <= {*HttpFlags.rows}


def test_bodies_have_the_ranges_of_sampling() -> None:
    names = {*GenerationFields.__struct_fields__} & SAMPLING_RANGES.keys() - {"seed"}
    assert {name: RANGES[name] for name in names} == {name: SAMPLING_RANGES[name] for name in names}


@given(name=st.sampled_from(sorted(SAMPLING_RANGES)), value=st.floats() | st.integers(-(2**63), 2**63 - 1))
def test_frontend_and_engine_reject_the_same_numbers(name: str, value: float) -> None:
    """The engine rejects whatever the frontend does, and more where it has limits of its own."""
    given_value: Any = int(value) if options_of(SamplingParams)[name].type is int and math.isfinite(value) else value
    params = SamplingParams(**{name: given_value})
    if SAMPLING_RANGES[name].holds(given_value):
        return
    with pytest.raises(ValueError, match=name):
        validate(params)
    with pytest.raises(RejectedError, match=name):
        SingleSequence.check(EngineCoreRequest("a", [1], params), LIMITS)


def one_too_many(name: str) -> Iterator[Any]:
    """Yield values of a sampling parameter that are a little longer than it may be, in each way."""
    most = SAMPLING_LENGTHS[name]
    entries: Any = {"stop": "a", "bad_words": "a", "bad_words_token_ids": [1]}.get(name, 1)
    if name == "logit_bias":
        yield dict.fromkeys(range(most.most + 1), 1.0)
        return
    yield [entries] * (most.most + 1)
    if most.total is not None:
        yield [entries * (most.total + 1)]


@pytest.mark.parametrize("name", sorted(SAMPLING_LENGTHS))
def test_frontend_and_engine_reject_the_same_lengths(name: str) -> None:
    for value in one_too_many(name):
        params = SamplingParams(**{name: value})
        with pytest.raises(ValueError, match=f"{name} has .* it may have"):
            validate(params)
        with pytest.raises(RejectedError, match=f"{name} has .* it may have"):
            SingleSequence.check(EngineCoreRequest("a", [1], params), LIMITS)


@pytest.mark.parametrize("name", sorted(STRUCTURED_LENGTHS))
def test_frontend_and_engine_reject_the_same_lengths_of_constraints(name: str) -> None:
    most = STRUCTURED_LENGTHS[name].most
    value = ["a"] * (most + 1) if name == "choice" else "a" * (most + 1)
    given_value: Any = {"json_object": True, name: value} if name == "whitespace_pattern" else {name: value}
    with pytest.raises(ValueError, match=f"{name} has {most + 1} .* it may have {most}"):
        validate(SamplingParams(structured_outputs=given_value))
    if name not in ("json", "grammar"):  # of which the frontend makes longer ones
        params = SamplingParams(structured_outputs=StructuredOutputs(**given_value))
        with pytest.raises(RejectedError, match=f"{name} has {most + 1}"):
            SingleSequence.check(EngineCoreRequest("a", [1], params), LIMITS)


def test_the_printed_reference_is_up_to_date() -> None:
    """`quire info --options > protocol/OPTIONS.md` writes it anew."""
    assert REFERENCE.read_text(encoding="utf-8") == option_reference()
    for table in TABLES:
        for name in options_of(table):
            assert f"| `{name}` |" in option_reference()
    for name, most in SAMPLING_LENGTHS.items():
        assert f"| `{name}` | {most} |" in option_reference()


# ---- rows, checks and texts -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A table.

    S:
        count: Count.
        share: Share, with a text
            of two lines: both count.
        name: Name. Default: any.

    T:
        tags: Tag.
        size: Size.
        is_on: On.
    """

    count: Annotated[int, Option("N", Range(1, 8))] = 2
    share: Annotated[float, Option("X", Range(0.0, 1.0, closed=False))] = 0.5
    name: Annotated[str | None, Option("NAME", choices=("a", "b"))] = None
    tags: Annotated[tuple[str, ...], Option("TEXT")] = ()
    size: Annotated[int | str | None, Option("SIZE")] = None
    is_on: Annotated[bool, Option()] = False

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count=0 is out of range; it must be a whole number from 1 to 8"),
        ({"count": 9}, "count=9 is out of range"),
        ({"count": 2.0}, r"count=2\.0 is out of range"),
        ({"count": True}, "count=True is out of range"),
        ({"count": None}, "count=None is out of range"),
        ({"share": 0}, "share=0 is out of range; it must be a number above 0 and at most 1"),
        ({"share": math.nan}, "share=nan is out of range"),
        ({"share": "1"}, "share='1' is out of range"),
        ({"name": "c"}, "name='c' is not possible; it must be one of a, b"),
        ({"tags": "x"}, "tags='x' is not possible"),
        ({"tags": (1,)}, r"tags=\(1,\) is not possible"),
        ({"size": "4 gigs"}, "size='4 gigs' is not possible; it must be a number of bytes above 0, or text such as"),
        ({"size": 0}, "size=0 is not possible"),
        ({"size": True}, "size=True is not possible"),
        ({"is_on": 1}, "is_on=1 is not possible; it must be True or False"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Sample(**values)


def test_good_values_pass() -> None:
    Sample(count=8, share=1, name="b", tags=("x", "y"), size="1.5 GiB", is_on=True)


def test_texts_of_flags_are_read() -> None:
    rows = options_of(Sample)
    read = [rows[name].parse(text) for name, text in (("count", "3"), ("share", "1"), ("name", "a"), ("size", "2K"))]
    assert read == [3, 1.0, "a", 2048]
    with pytest.raises(ValueError, match="count='three' is out of range"):
        rows["count"].parse("three")


def test_a_row_describes_itself() -> None:
    rows = options_of(Sample)
    assert rows["count"].description == "Count. Default: 2."
    assert rows["name"].description == "Name. One of a, b. Default: any."
    assert rows["is_on"].description == "On. Default: no."
    assert rows["share"].description == "Share, with a text of two lines: both count. Default: 0.5."
    assert (rows["name"].section, rows["tags"].section) == ("S", "T")
    assert (rows["tags"].is_list, rows["size"].is_size, rows["name"].is_optional) == (True, True, True)


def test_command_lines_leave_out_what_was_not_given() -> None:
    values = {"max_num_seqs": 8, "seed": None, "pin_threads": True, "enable_prefix_caching": False}
    assert command_line(values) == ["--max-num-seqs=8", "--pin-threads", "--no-enable-prefix-caching"]


def test_a_text_that_begins_with_a_dash_is_a_value() -> None:
    parsed = parse_arguments(command_line({"model": "-m", "weight_cache": "--x"}))
    assert (parsed.model, parsed.weight_cache) == ("-m", "--x")


def test_only_folders_and_files_may_be_path_objects(tmp_path: Path) -> None:
    EngineArgs.from_options(str(tmp_path), {"weight_cache": tmp_path})
    with pytest.raises(ValueError, match="engine_address="):
        EngineArgs.from_options(None, {"engine_address": tmp_path})


def test_flags_have_no_abbreviations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--model=m", "--kv-cache-memory=4GiB"])
    assert "--kv-cache-memory=4GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("512MB", 512 * 10**6),
        ("1.5G", 3 << 29),
        ("1048576", 1 << 20),
        (" 2 t ", 2 << 40),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "1e9", "4 GiBs", "9" * 400 + "G", "99999999T"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 4GiB"):
        parse_size(text)
