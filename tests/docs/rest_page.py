"""Write docs/reference/rest-operations.md from the coordinator's OpenAPI document: `python -m tests.docs.rest_page`."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.live_server import live_server
from tests.stock_python import ROOT

PAGE = ROOT / "docs" / "reference" / "rest-operations.md"
HEAD = """# REST operations

Every operation and every field, made from the coordinator's own OpenAPI document by `python -m tests.docs.rest_page`; a
test compares both. What happens in which order, and what to do when something goes wrong: [rest.md](rest.md).
"""
Document = Mapping[str, Any]


def page(document: Document) -> str:
    """Return the page of an OpenAPI document."""
    return "\n".join([HEAD, *_operations(document), "## Objects\n", *_schemas(document)]).rstrip() + "\n"


def _operations(document: Document) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"## {tag['name'].capitalize()}\n\n{tag['description']}\n"
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield from _operation(f"{method.upper()} {path}", operation)


def _operation(name: str, operation: Document) -> Iterator[str]:
    summary = operation["summary"]
    told = f"**{summary}{'' if summary.endswith('?') else '.'}** {operation.get('description', '').strip()}".strip()
    yield f"### {name}\n\n{_linked(told)}\n"
    given = [parameter for parameter in operation.get("parameters", ()) if parameter["name"] != "authorization"]
    if given:
        yield "| parameter | in | type | |\n|---|---|---|---|"
        for parameter in given:
            words = [parameter.get("description", ""), "" if parameter.get("required") else "optional"]
            yield _row(f"`{parameter['name']}`", parameter["in"], _type(parameter["schema"]), _joined(words))
        yield ""
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body: {_type(content['schema'])}, {kind}.\n"
    yield "| answer | type | |\n|---|---|---|"
    for status, answer in operation["responses"].items():
        if int(status) < 400:
            for kind, content in answer.get("content", {"": {}}).items():
                words = [kind, "" if answer["description"] == "Successful Response" else answer["description"]]
                yield _row(status, _type(content.get("schema", {})), _joined(words))
    refusals = ", ".join(status for status in operation["responses"] if int(status) >= 400)
    yield f"{_row(refusals, '[Problem](#problem)', '')}\n" if refusals else ""


def _schemas(document: Document) -> Iterator[str]:
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f"### {name}\n"
        if "description" in schema:
            yield f"{schema['description'].strip()}\n"
        yield "| field | type | default | |\n|---|---|---|---|"
        required = schema.get("required", ())
        for field, about in schema.get("properties", {}).items():
            default = "required" if field in required else f"`{json.dumps(about.get('default'))}`"
            yield _row(f"`{field}`", _type(about), default, about.get("description", ""))
        yield ""


def _type(schema: Document) -> str:
    """Name the type of a value, with links to objects."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}".removesuffix(" of ")
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    if schema.get("format") == "binary" or "contentMediaType" in schema:
        return "bytes"
    return str(kind)


def _joined(words: list[str]) -> str:
    return "; ".join(word.rstrip(".") for word in words if word)


def _linked(text: str) -> str:
    """Turn the names of other pages into links."""
    return re.sub(r"docs/(\w+)/([a-z-]+\.md)", r"[\2](../\1/\2)", text)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(_linked(cell).replace("|", "\\|").split()) for cell in cells) + " |"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, live_server(Path(folder)) as server:
        PAGE.write_text(page(httpx.get(f"{server.url}/openapi.json").json()), "utf-8")


if __name__ == "__main__":
    main()
