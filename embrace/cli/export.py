"""`embrace export`: a model becomes a bundle."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from edge_runtime.signing import read_key, sign_bundle
from embrace.cli import show
from federation.errors import InputError
from federation.inputs import NamedInput
from federation.manifest import MOST_RANK, PLAIN_LOSSES, TRACED_LOSSES, MemoryPlan
from federation.preprocessing import Preprocessing

if TYPE_CHECKING:
    from embrace.bundles import Bundle

DTYPES = ("float32", "int64")
BOUNDARY_KEYS = (
    "name",
    "tiers",
    "width",
    "parameters",
    "statistics",
    "activations",
    "capacity",
    "train_bytes",
    "engines",
)


def export(
    model: Annotated[
        str | None,
        typer.Argument(help="A zoo name, path/to/file.py:factory, or a forward graph model.onnx."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory to write; absent or empty. Default: ./NAME")] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="Input shape without the batch: 3,32,32. Several inputs, one option each: NAME=SHAPE:TYPE:VOCABULARY.",
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Input type: float32 or int64 (tokens).")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Token inputs: ids are below this number.")] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join([*PLAIN_LOSSES, *TRACED_LOSSES])}; FILE.py:function; or OUTPUT=LOSS:WEIGHT for each of "
            "several outputs, one option each."
        ),
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option(help="Of FILE.py:function and ctc: SHAPE:TYPE:CLASSES without the batch, or NAME=… for several."),
    ] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of the label spread over all classes.")] = None,
    ignore_index: Annotated[int | None, typer.Option(help="Label that does not count.")] = None,
    classes_last: Annotated[
        bool | None, typer.Option("--classes-last", help="Outputs have their classes last: POSITIONS,CLASSES.")
    ] = None,
    next_token: Annotated[
        bool | None, typer.Option("--next-token", help="Each position predicts the next label: labels are the tokens.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="huber: errors beyond it count linearly. Default: 1.")] = None,
    gamma: Annotated[float | None, typer.Option(help="focal: how much sure labels count less. Default: 2.")] = None,
    split: Annotated[str | None, typer.Option(help="Boundaries to export: NAME,NAME@STEPS,… Default: all.")] = None,
    tiers: Annotated[
        str | None, typer.Option(help="Largest boundary within a capacity: weak=0.16,moderate=0.42")
    ] = None,
    widths: Annotated[
        str | None, typer.Option(help="Narrow models beside the boundaries, by their share of the channels: 0.45,0.2")
    ] = None,
    memory_plan: Annotated[
        str,
        typer.Option(
            help="Time that training gives for memory: fast (none), balanced (3 %), small (up to 25 %); half: as "
            "balanced, and values wait for the backward pass as float16."
        ),
    ] = "balanced",
    engine: Annotated[str, typer.Option(help="portable, ort-training, or both: portable,ort-training")] = "portable",
    classes: Annotated[
        str | None,
        typer.Option(help="Names in order, cat,dog; or data that has them: a folder, FILE.csv or FILE.jsonl."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Of that FILE.csv: the column with the label.")] = None,
    scale: Annotated[
        str | None, typer.Option(help="Stored values are multiplied by it: 1/255. Default: bytes by 1/255, others not.")
    ] = None,
    mean: Annotated[str | None, typer.Option(help="Subtracted after that, for all or by channel: 0.5,0.5,0.5")] = None,
    std: Annotated[str | None, typer.Option(help="Divided by at last, for all or by channel: 0.25,0.25,0.25")] = None,
    output: Annotated[
        str | None,
        typer.Option(help="Of several outputs the one to train: key, field or position. Default: logits."),
    ] = None,
    new_head: Annotated[
        int | None,
        typer.Option(min=1, help="Classes of a new last dense layer, of an ONNX classifier or of minilm."),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANK, help="Rank of adapters that are trained instead of the weights."),
    ] = None,
    lora_layers: Annotated[
        str | None, typer.Option(help="Layers with adapters: '*.q_proj,*.v_proj'. Default: every linear one.")
    ] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Adapters count alpha / rank. Default: the rank.")] = None,
    lora_full: Annotated[
        str | None, typer.Option(help="Layers that are trained themselves beside the adapters: head")
    ] = None,
    frozen: Annotated[
        str | None, typer.Option(help="Store weights that are not trained as float32, float16, int8 or int4.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer.json that travels in the bundle: devices then take texts.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size at which capacity is quoted.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the initial weights of a PyTorch model.")] = 0,
    sign: Annotated[Path | None, typer.Option(help="Sign with this private key ('embrace key new').")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the zoo and exit.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Turn a model into a bundle that stock ONNX Runtime can train from every layer boundary.

    Example: embrace export resnet20 --out bundles/resnet20 --engine portable,ort-training

    Example: embrace export mymodel.py:build --input 3,32,32 --tiers weak=0.16,moderate=0.42

    Example: embrace export mymodel.py:build --input 3,32,32 --classes photos/ --mean 0.5 --std 0.25

    Example: embrace export mobilenetv2 --memory-plan small

    Example: embrace export classifier.onnx --new-head 5

    Example: embrace export minilm --classes negative,positive

    Example: embrace export bert.py:build --input input_ids=64:int64:30522 --input attention_mask=64:int64:2

    Example: embrace export lm.py:build --input 64 --dtype int64 --vocabulary 512 --classes-last --next-token

    Example: embrace export lm.py:build --input 64 --dtype int64 --vocabulary 512 --tokenizer tokenizer.json

    Example: embrace export mymodel.py:build --input 3,32,32 --loss losses.py:mine --labels :int64:10

    Example: embrace export mymodel.py:build --input 3,32,32 --loss digit=cross_entropy --loss angle=mse:0.5

    Example: embrace export mymodel.py:build --input 128 --dtype int64 --vocabulary 30522 --lora 8 --frozen int4
    """
    if list_:
        _list_zoo(json_)
        return
    if model is None:
        raise InputError("say which model: a zoo name ('embrace export --list'), file.py:factory, or model.onnx")
    started = time.perf_counter()
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: expected {' or '.join(DTYPES)}")
    if memory_plan not in get_args(MemoryPlan):
        raise InputError(f"--memory-plan {memory_plan}: expected {', '.join(get_args(MemoryPlan))}")
    key = None if sign is None else read_key(sign)  # a wrong one is answered before PyTorch is loaded
    with show.progress("export") as report:
        from embrace.bundles import Bundle, open_source, parse_lora
        from model_export.bundle import Choices, export_bundle

        shape, inputs = _parse_inputs(input_ or [])
        choices = Choices(
            show.comma_list(split),
            _parse_tiers(tiers),
            show.comma_list(engine),
            _parse_widths(widths),
            cast(MemoryPlan, memory_plan),
        )
        source = open_source(
            model,
            input_shape=shape,
            inputs=inputs,
            dtype=dtype,
            vocabulary=vocabulary,
            loss=loss or None,
            labels=_parse_labels(labels or []),
            label_smoothing=label_smoothing,
            ignore_index=ignore_index,
            classes_last=classes_last,
            next_token=next_token,
            delta=delta,
            gamma=gamma,
            batch=batch,
            seed=seed,
            classes=_parse_classes(classes),
            label=label,
            output=output,
            new_head=new_head,
            lora=parse_lora(lora, lora_layers, lora_alpha, lora_full),
            frozen=frozen,
            tokenizer=tokenizer,
            preprocessing=Preprocessing(
                _fraction("--scale", scale) if scale is not None else None,
                tuple(_fraction("--mean", part) for part in show.comma_list(mean)),
                tuple(_fraction("--std", part) for part in show.comma_list(std)),
            ),
        )
        target = out or Path(source.name)
        export_bundle(source, target, choices, report)
        if key is not None:
            sign_bundle(target, key)
    _show_result(Bundle(target), time.perf_counter() - started, json_)


def _parse_inputs(texts: list[str]) -> tuple[tuple[int, ...] | None, list[NamedInput] | None]:
    """Read the shape of the only input, or several inputs by name."""
    if texts and "=" not in texts[0]:
        if len(texts) > 1:
            raise InputError(f"--input {texts[1]}: several inputs need names, as in --input ids=64:int64:30522")
        return _parse_shape(texts[0], f"--input {texts[0]}"), None
    return None, [_parse_input(text) for text in texts] or None


def _parse_labels(texts: list[str]) -> list[NamedInput] | None:
    """Read what labels look like: of one tensor, or of several by name."""
    if len(texts) == 1 and "=" not in texts[0]:
        return [_parse_input(f"labels={texts[0]}", "--labels")]
    return [_parse_input(text, "--labels") for text in texts] or None


def _parse_input(text: str, option: str = "--input") -> NamedInput:
    name, _, rest = text.partition("=")
    shape, dtype, vocabulary, *more = (*rest.split(":"), "", "")
    if (vocabulary and not vocabulary.isdecimal()) or any(more):
        raise InputError(f"{option} {text}: expected NAME=SHAPE:TYPE:VOCABULARY, as in ids=64:int64:30522 or age=1")
    numbers = () if shape in ("", "()") else _parse_shape(shape, f"{option} {text}")
    return NamedInput(name.strip(), dtype or "float32", numbers, int(vocabulary) if vocabulary else None)


def _parse_shape(shape: str, text: str) -> tuple[int, ...]:
    parts = show.comma_list(shape)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{text}: expected positive numbers separated by commas, e.g. 3,32,32")
    return tuple(map(int, parts))


def _parse_classes(text: str | None) -> str | list[str] | None:
    """Tell names from the data that has them."""
    if text is None or text.lower().endswith((".csv", ".jsonl")) or Path(text).is_dir():
        return text
    return show.comma_list(text)


def _fraction(option: str, text: str) -> float:
    try:
        return float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InputError(f"{option} {text}: expected a number, as 0.5 or 1/255") from None


def _parse_tiers(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    found = {}
    for part in show.comma_list(text):
        name, _, share = part.partition("=")
        if name.strip() in found:
            raise InputError(f"--tiers names {name.strip()!r} twice")
        try:
            found[name.strip()] = float(share)
        except ValueError:
            raise InputError(f"--tiers {part}: expected NAME=CAPACITY, e.g. weak=0.16") from None
    return found


def _parse_widths(text: str | None) -> list[float]:
    try:
        return [float(part) for part in show.comma_list(text)]
    except ValueError:
        raise InputError(
            f"--widths {text}: expected numbers between 0 and 1 separated by commas, e.g. 0.45,0.2"
        ) from None


def _list_zoo(as_json: bool) -> None:
    with show.progress("zoo"):
        from model_export.zoo import PRETRAINED, ZOO

        rows: list[dict[str, Any]] = [
            {
                "name": entry.name,
                "parameters": entry.count_parameters(),
                "input": list(entry.input_shape),
                "dtype": entry.input_dtype,
                "loss": entry.loss,
                "tiers": {tier: place.boundary for tier, place in entry.tiers.items()},
                "summary": entry.summary,
            }
            for entry in (*ZOO.values(), *PRETRAINED.values())
        ]
    if as_json:
        show.print_json(rows)
        return
    cells = [
        (r["name"], r["summary"], r["loss"], f"{show.shape(r['input'])} {r['dtype']}", show.number(r["parameters"]))
        for r in rows
    ]
    show.console().print(show.table("zoo", ("name", "what", "loss", "input", "parameters"), cells, left=3))


def summary(bundle: Bundle, seconds: float) -> dict[str, Any]:
    """Return what an export made, as `--json` prints it."""
    manifest = bundle.manifest
    return {
        "directory": str(bundle.path),
        "name": manifest.name,
        "layers": len(manifest.layers),
        "batch": manifest.batch,
        "loss": manifest.loss.name,
        "memory_plan": manifest.memory_plan,
        "classes": None if manifest.classes is None else list(manifest.classes),
        "boundaries": [{key: row[key] for key in BOUNDARY_KEYS} for row in bundle.boundaries],
        "tiers": manifest.tiers,
        "signer": bundle.signer,
        "notes": list(manifest.notes),
        "files": len(manifest.files()) + 1,
        "bytes": sum(ref.bytes for ref in manifest.files()),
        "seconds": round(seconds, 3),
    }


def _show_result(bundle: Bundle, seconds: float, as_json: bool) -> None:
    facts = summary(bundle, seconds)
    if as_json:
        show.print_json(facts)
        return
    rows = [
        (
            b["name"],
            ", ".join(b["tiers"]),
            ", ".join(b["engines"]),
            show.number(b["parameters"]),
            show.number(b["activations"]),
            f"{b['capacity']:.3f}",
            show.size(b["train_bytes"]) if b["train_bytes"] is not None else "–",
        )
        for b in facts["boundaries"]
    ]
    columns = ("boundary", "tier", "engines", "parameters p", "activations a", "capacity", "training graph")
    layers = "1 layer" if facts["layers"] == 1 else f"{facts['layers']} layers"
    title = f"{bundle.name}: {layers}, batch {facts['batch']}, loss {facts['loss']}"
    screen = show.console()
    screen.print(show.table(title, columns, rows, left=3))
    if facts["signer"]:
        screen.print(f"signed by {facts['signer']}", markup=False, soft_wrap=True)
    for note in facts["notes"]:
        screen.print(f"note: {note}", markup=False)
    written = f"{facts['files']} files, {show.size(facts['bytes'])}, in {bundle.path} after {seconds:.1f} s"
    screen.print(written, markup=False)
    screen.print(f"next: embrace inspect {bundle.path}\n      embrace verify {bundle.path}", markup=False)
