"""Registries of specs added by packages and ``./conf``, and imports of named objects.

The kinds are quantizers, adapter methods, objectives, suites and data sources. A spec is a
torch-free object used by planning, rules, records and reports. It names an object that may import
torch by ``module:name``, which is imported only where it is used. A package adds a spec under the
kind's entry point group, and a file of ``./conf`` by its ``_target_``. The spec has the name of the
entry point or file, and is imported only when a run needs it.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mens_exp.config.option_files import named_specs
from mens_exp.errors import ConfigError, SetupError, listed, nearest

_NAME = re.compile(r"(?!mro$|name$|value$)[a-z][a-z0-9_]*[a-z0-9]")  # an enum member


class Named(Protocol):
    """Something with a name."""

    @property
    def name(self) -> str:
        """The name used in settings and records."""


SpecT = TypeVar("SpecT", bound=Named)
ObjectT = TypeVar("ObjectT")


@dataclass(kw_only=True)
class Registry(Generic[SpecT]):
    """The specs of one kind by name: built-in, from installed packages, and from ``./conf``.

    Attributes:
        kind: the kind in words, such as ``quantizer``.
        group: its entry point group.
        spec: the class of its specs.
        built_in: the built-in specs by name.
        options: the config group whose files may name a spec; None if they name classes.
    """

    kind: str
    group: str
    spec: type[SpecT]
    built_in: dict[str, SpecT]
    options: str | None = None
    _offers: dict[str, list[EntryPoint]] | None = field(default=None, init=False)
    _known: dict[Any, SpecT | None] = field(default_factory=dict, init=False)

    def installed_names(self) -> tuple[str, ...]:
        """Return the names that installed packages add, without importing them."""
        return tuple(sorted(self._installed().keys() - self.built_in.keys()))

    def added_names(self) -> tuple[str, ...]:
        """Return the names that installed packages and ``./conf`` add, without importing them."""
        added = self._installed().keys() | self.named_in_conf().keys()
        return tuple(sorted(added - self.built_in.keys()))

    def named_in_conf(self) -> dict[str, tuple[Path, str]]:
        """Return the specs named in files of ``./conf``: name -> (file, ``module.SPEC``)."""
        found = named_specs(self.options) if self.options else {}
        return {name: place for name, place in found.items() if _NAME.fullmatch(name)}

    def known(self, name: str) -> SpecT | None:
        """Return the spec of a name from a record; None if it does not exist here.

        Raises:
            SetupError: an installed package provides the name, but its spec is unusable.
            ConfigError: a file of ``./conf`` provides the name, but its spec is unusable.
        """
        own = self.named_in_conf().get(name)
        key = name if own is None else (name, *own)
        if key not in self._known:
            self._known[key] = self._found(name, own)
        return self._known[key]

    def named(self, name: str) -> SpecT:
        """Return the spec of a name that the schema accepts.

        Raises:
            SetupError: an installed package provides the name, but its spec is unusable.
            ConfigError: a file of ``./conf`` provides the name, but its spec is unusable or the
                file no longer exists.
        """
        spec = self.known(name)
        if spec is None:
            raise self.absent(name, where=self.options or self.group)
        return spec

    def absent(self, name: str, *, where: str) -> ConfigError:
        """Return the error for a name that is neither built in nor added here."""
        return ConfigError(
            f"unknown {self.kind}",
            where=where,
            found=name,
            expected=listed([*self.built_in, *self.added_names()]),
            remedy=f"install the package that has {name}"
            + (f", or start where conf/{self.options}/{name}.yaml is" if self.options else ""),
        )

    def _installed(self) -> dict[str, list[EntryPoint]]:
        if self._offers is None:
            self._offers = {}
            for one in entry_points(group=self.group):
                if _NAME.fullmatch(one.name):
                    self._offers.setdefault(one.name, []).append(one)
        return self._offers

    def _found(self, name: str, own: tuple[Path, str] | None) -> SpecT | None:
        offers = self._installed().get(name, [])
        sources = [f"{one.value} of {one.dist.name if one.dist else 'a package'}" for one in offers]
        if own is not None:
            sources.append(f"{own[1]} of {own[0]}")
        if name in self.built_in:
            sources.insert(0, "mens_exp")
        if len(sources) > 1:
            raise SetupError(
                f"several {self.kind}s are called {name}",
                where=f"entry points of {self.group}" if own is None else f"{own[0]}: _target_",
                found=", ".join(sources),
                expected="one",
                remedy="uninstall the other packages, or rename their entry points"
                if own is None
                else "rename the file and its spec",
            )
        if own is not None:
            return self._named(name, own[1])
        return self._loaded(offers[0]) if offers else self.built_in.get(name)

    def _named(self, name: str, target: str) -> SpecT:
        assert self.options is not None
        spec = target_at(self.options, target)
        if isinstance(spec, self.spec) and spec.name == name:
            return spec
        is_spec = isinstance(spec, self.spec)
        raise ConfigError(
            "does not have the name of its file" if is_spec else "has the wrong type",
            where=f"{self.options}._target_",
            found=f"{target}, {spec.name if is_spec else repr(spec)}",
            expected=f"a {self.spec.__module__}.{self.spec.__name__} with the name {name}",
            remedy="see docs/how-to/extending.md",
        )

    def _loaded(self, offer: EntryPoint) -> SpecT:
        where = f"entry point {offer.name} of {self.group}"
        remedy = f"repair or uninstall {offer.dist.name if offer.dist else 'the package'}"
        try:
            spec = offer.load()
        except Exception as error:
            raise SetupError(
                f"an installed {self.kind} cannot be imported",
                where=where,
                found=f"{type(error).__name__}: {error}",
                expected=offer.value,
                remedy=remedy,
            ) from error
        if not isinstance(spec, self.spec) or spec.name != offer.name:
            raise SetupError(
                f"an installed {self.kind} has the wrong type or name",
                where=where,
                found=repr(spec),
                expected=f"a {self.spec.__name__} with the name {offer.name}",
                remedy=remedy,
            )
        return spec


def named_object(place: str, base: type[ObjectT], *, of: str) -> ObjectT:
    """Import the object that a spec names.

    Args:
        place: ``module:name``.
        base: the required class.
        of: the spec in words, such as "the quantizer nf4".

    Raises:
        SetupError: it cannot be imported, or is not an instance of ``base``.
    """
    found = _imported(place, base, of)
    if not isinstance(found, base):
        raise _unusable(place, base, of, repr(found))
    return found


def named_class(place: str, base: type[ObjectT], *, of: str) -> type[ObjectT]:
    """Import the class that a spec names; see :func:`named_object`."""
    found = _imported(place, base, of)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise _unusable(place, base, of, repr(found))
    return found


def _imported(place: str, base: type[Any], of: str) -> Any:
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise _unusable(place, base, of, f"{type(error).__name__}: {error}") from error


def _unusable(place: str, base: type[Any], of: str, found: str) -> SetupError:
    return SetupError(
        f"{of} cannot be used",
        where=place,
        found=found,
        expected=f"a class that extends {base.__module__}.{base.__qualname__}, or an object of one",
        remedy="repair it, or uninstall the package that registers it",
    )


def target_at(place: str, target: str) -> Any:
    """Import the object that a target names; the working directory comes first.

    Args:
        place: dotted path of the section that names it, for messages.
        target: ``module.Class``.

    Raises:
        ConfigError: the module or class does not exist, or importing the module fails.
    """
    where = f"{place}._target_"
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:  # present only under `python -m`
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    module_name, _, name = target.rpartition(".")
    if not module_name:
        raise ConfigError(
            "does not name a module",
            where=where,
            found=target,
            expected="module.Class, in ./module.py",
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise _failed(where, target, error) from error
        files = [file.stem for file in Path.cwd().glob("*.py")]
        close = nearest(module_name, files)
        raise ConfigError(
            f"there is no module {error.name}",
            where=where,
            found=target,
            expected="a module in the working directory, or an installed one"
            + (f"; the nearest is {close}" if close else ""),
        ) from error
    except Exception as error:
        raise _failed(where, target, error) from error
    if not hasattr(module, name):
        close = nearest(name, [entry for entry in vars(module) if not entry.startswith("_")])
        raise ConfigError(
            f"{module_name} has no {name}",
            where=where,
            found=target,
            expected=f"the nearest is {module_name}.{close}" if close else "a class of the module",
        )
    return getattr(module, name)


def _failed(where: str, target: str, error: Exception) -> ConfigError:
    return ConfigError(
        "its module cannot be imported",
        where=where,
        found=f"{target}: {error_text(error)}",
        expected="a module that imports",
    )


def error_text(error: Exception) -> str:
    """Format an error of third-party code for a message: type, text, file and line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{line}"
