"""Checks that compare an answer's text with its expected value."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from mens_exp.artifacts.untrusted_input import pattern_problem, pattern_searches
from mens_exp.config.suite import JsonlCheck
from mens_exp.errors import ConfigError, DataError, MissingExtra
from mens_exp.evals.completion_styles import code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PATTERNS: Final = "suite.path: a pattern that is expected"
_TOO_DEEP: Final = "it is nested too deeply to be read"
_DRAFTS: Final = re.compile(r"https?://json-schema\.org/draft[-/]")


class Check(Protocol):
    """A check; its messages go into repair prompts, so they do not reveal the expected value."""

    def refuses(self, expected: Any) -> str | None:
        """Return the reason why a value is not a valid expected value, or None if it is."""

    def reference(self, expected: Any) -> str:
        """Return a correct answer; empty if none can be derived."""

    def parses(self, answer: str) -> bool | None:
        """Return whether an answer has the required form; None if no form is required."""

    def error(self, prompt: str, expected: Any, answer: str) -> str | None:
        """Return the error of an answer, or None if it is correct."""


def check_named(kind: JsonlCheck, function: str | None) -> Check:
    """Return the check of a kind.

    Args:
        kind: the kind.
        function: the user's function for ``function``, ``<file>.py:<name>``.

    Raises:
        ConfigError: there is no such function.
        MissingExtra: a library is not installed.
    """
    if kind is JsonlCheck.function:
        return Function(call=function_named(function or ""), name=function or "")
    if kind is JsonlCheck.json_schema:
        _require_jsonschema()
    return _PLAIN[kind]()


class _Text:
    """Base class of text checks: the expected value is a reference, and any form is accepted."""

    def refuses(self, expected: Any) -> str | None:
        return None if isinstance(expected, str) and expected.strip() else "must be a text"

    def reference(self, expected: Any) -> str:
        return str(expected)

    def parses(self, answer: str) -> bool | None:
        del answer
        return None


class Exact(_Text):
    """Equal text, ignoring white space at both ends."""

    def error(self, prompt: str, expected: Any, answer: str) -> str | None:
        """Compare the texts."""
        del prompt
        return None if answer.strip() == expected.strip() else "it is not what was asked for"


class Contains(_Text):
    """An answer that contains all expected texts, ignoring case."""

    def refuses(self, expected: Any) -> str | None:
        """Accept one or several texts."""
        texts = [expected] if isinstance(expected, str) else expected
        good = isinstance(texts, list) and bool(texts)
        good = good and all(isinstance(one, str) and one for one in texts)
        return None if good else "must be a text, or a list of texts"

    def reference(self, expected: Any) -> str:
        """Return the texts, one per line."""
        return "\n".join([expected] if isinstance(expected, str) else expected)

    def error(self, prompt: str, expected: Any, answer: str) -> str | None:
        """Count the missing texts."""
        del prompt
        texts = [expected] if isinstance(expected, str) else expected
        absent = sum(one.casefold() not in answer.casefold() for one in texts)
        return None if not absent else f"it lacks {absent} of {len(texts)} texts"


class Regex(_Text):
    """An answer in which the pattern matches somewhere."""

    def refuses(self, expected: Any) -> str | None:
        """Accept a regular expression."""
        if not isinstance(expected, str) or not expected:
            return "must be a pattern"
        problem = pattern_problem(expected, _PATTERNS)
        return None if problem is None else f"is not a pattern: {problem}"

    def reference(self, expected: Any) -> str:
        """Return an empty text: a pattern yields no answer."""
        del expected
        return ""

    def error(self, prompt: str, expected: Any, answer: str) -> str | None:
        """Search for the pattern.

        Raises:
            DataError: the search takes too long.
        """
        del prompt
        return (
            None
            if pattern_searches(expected, answer, _PATTERNS)
            else "it does not have the form asked for"
        )


class JsonSchema(_Text):
    """JSON, possibly in a fence, that conforms to the schema."""

    def refuses(self, expected: Any) -> str | None:
        """Accept a JSON Schema."""
        import jsonschema

        if not isinstance(expected, dict):
            return "must be a JSON schema, an object"
        kind = jsonschema.validators.validator_for(expected)
        formats = copy.copy(kind.FORMAT_CHECKER)
        formats.checkers = {**formats.checkers, "regex": (_is_pattern, ())}
        try:
            kind.check_schema(expected, format_checker=formats)
        except jsonschema.SchemaError as error:
            return f"is not a JSON schema: {error.message}"
        elsewhere = next(_elsewhere(expected, set(_ids(expected))), None)
        if elsewhere is not None:
            return f"refers to a schema that is not in it: {elsewhere}; put the schema into $defs"
        return None

    def reference(self, expected: Any) -> str:
        """Return an empty text: a schema yields no answer."""
        del expected
        return ""

    def parses(self, answer: str) -> bool | None:
        """Return whether the answer is JSON."""
        return not isinstance(_json(answer), ValueError)

    def error(self, prompt: str, expected: Any, answer: str) -> str | None:
        """Validate the answer against the schema."""
        import jsonschema
        from jsonschema_specifications import REGISTRY
        from referencing.exceptions import Unresolvable

        del prompt
        value = _json(answer)
        if isinstance(value, ValueError):
            return f"it is not JSON: {value}"
        # Without a registry, jsonschema would fetch remote references.
        guarded = _guarded(jsonschema.validators.validator_for(expected))
        validator = guarded(expected, registry=REGISTRY)
        try:
            found = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except RecursionError:
            return _TOO_DEEP
        except Unresolvable as error:
            raise DataError(
                "a schema refers to a part that is missing",
                where="suite.path",
                found=error.ref,
                remedy="put the part into its $defs",
            ) from error
        return None if found is None else f"at {found.json_path}: {found.message}"


def _ids(schema: Any) -> Iterator[str]:
    """Yield the ids that parts of a schema define."""
    if isinstance(schema, dict):
        named = schema.get("$id", schema.get("id"))
        if isinstance(named, str):
            yield named.removesuffix("#")
    for one in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(one, dict | list):
            yield from _ids(one)


def _elsewhere(schema: Any, ids: set[str]) -> Iterator[str]:
    """Yield references that leave a schema, except those to the JSON Schema drafts."""
    for name, one in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if name in {"$ref", "$dynamicRef", "$recursiveRef"} and isinstance(one, str):
            place = one.partition("#")[0]
            if place and place not in ids and not _DRAFTS.match(place):
                yield one
        elif isinstance(one, dict | list):
            yield from _elsewhere(one, ids)


def _is_pattern(value: object) -> bool:
    return not isinstance(value, str) or pattern_problem(value, _PATTERNS) is None


@functools.cache
def _guarded(kind: Any) -> Any:
    """Return a validator class that matches patterns in a process that can be terminated."""
    import jsonschema

    def pattern(validator: Any, expected: str, value: Any, _: Any) -> Iterator[Any]:
        if validator.is_type(value, "string") and not pattern_searches(expected, value, _PATTERNS):
            yield jsonschema.ValidationError(f"{value!r} does not match {expected!r}")

    def properties(validator: Any, expected: Any, value: Any, _: Any) -> Iterator[Any]:
        for name, one in expected.items() if validator.is_type(value, "object") else ():
            for key in value:
                if pattern_searches(name, key, _PATTERNS):
                    yield from validator.descend(value[key], one, path=key, schema_path=name)

    known = {"pattern": pattern, "patternProperties": properties}
    guarded = jsonschema.validators.extend(kind, known)

    def evolve(validator: Any, **changes: Any) -> Any:
        # For a part that names its draft, jsonschema would use its own class, without the guard.
        part = changes.get("schema", validator.schema)
        fields = (one for one in guarded.__attrs_attrs__ if one.init)
        values = {one.alias: getattr(validator, one.name) for one in fields}
        own = jsonschema.validators.validator_for(part, default=kind)
        return _guarded(own)(**(values | changes))

    guarded.evolve = evolve
    return guarded


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A user-defined function: (prompt, expected, answer) -> True, or an error message."""

    call: Callable[[str, Any, str], Any]
    name: str

    def refuses(self, expected: Any) -> str | None:
        """Accept any value."""
        del expected
        return None

    def reference(self, expected: Any) -> str:
        """Return an empty text: a function yields no answer."""
        del expected
        return ""

    def parses(self, answer: str) -> bool | None:
        """Return None: a function requires no form."""
        del answer
        return None

    def error(self, prompt: str, expected: Any, answer: str) -> str | None:
        """Call the function.

        Raises:
            DataError: it fails, or returns no verdict.
        """
        try:
            verdict = self.call(prompt, expected, answer)
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        if isinstance(verdict, str):
            return verdict
        if verdict is True or verdict is False:
            return None if verdict else "it is not what was asked for"
        raise self._failed(repr(verdict))

    def _failed(self, found: str) -> DataError:
        return DataError(
            "returns no verdict",
            where=f"suite.function: {self.name}",
            found=found,
            expected="True, False, or a text that says what is wrong",
        )


_PLAIN: dict[JsonlCheck, Callable[[], Check]] = {
    JsonlCheck.exact: Exact,
    JsonlCheck.contains: Contains,
    JsonlCheck.regex: Regex,
    JsonlCheck.json_schema: JsonSchema,
}


def function_named(text: str) -> Callable[[str, Any, str], Any]:
    """Import the file of a function, and return it.

    Args:
        text: ``<file>.py:<name>``.

    Raises:
        ConfigError: the file or the function does not exist, or importing the file fails.
    """
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.is_file():
        raise _no_function(text, "file not found")
    spec = importlib.util.spec_from_file_location(f"mens_exp_own_{path.stem}", path)
    assert spec is not None, "it is a Python file"
    assert spec.loader is not None, "it is a Python file"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _no_function(text, f"{type(error).__name__}: {error}") from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise _no_function(text, f"{path.name} has no function {name}")
    return function  # type: ignore[no-any-return]


def _no_function(text: str, found: str) -> ConfigError:
    return ConfigError(
        "does not name a function",
        where="suite.function",
        found=f"{text}: {found}",
        expected="<file>.py:<name> of a function (prompt, expected, answer)",
    )


def _json(answer: str) -> Any:
    """Return the parsed value, or the parser's error."""
    try:
        return json.loads(code_of(answer), parse_constant=_no_json)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError(_TOO_DEEP)


def _no_json(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _require_jsonschema() -> None:
    if importlib.util.find_spec("jsonschema") is None:
        raise MissingExtra(
            "jsonschema is needed to check an answer against a schema",
            where="suite.check",
            remedy="run: pip install 'mens-exp[schema]'",
        )
