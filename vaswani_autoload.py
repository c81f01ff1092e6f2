"""Let transformers find `vaswani` checkpoints in programs that never import `vaswani`.

torch calls `install` when it is imported (its entry point group `torch.backends`). That places entries in transformers'
own tables, as soon as transformers has loaded them, which import `vaswani` at the first look-up of its model type or
of its tokenizer. Until then nothing is imported. Whatever goes wrong here, the program goes on as if `vaswani` were
not installed.

Set `VASWANI_AUTOLOAD=0` to switch it off.
"""

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader

# Where transformers looks names up: module, its object that has the table (None: itself), table, and our names in it.
TABLES = {
    "transformers.models.auto.configuration_auto": ("CONFIG_MAPPING", "_extra_content", ("vaswani",)),
    "transformers.models.auto.tokenization_auto": (
        None,
        "REGISTERED_TOKENIZER_CLASSES",
        ("VaswaniTokenizer", "VaswaniMarianTokenizer", "VaswaniMosesTokenizer", "VaswaniPairTokenizer"),
    ),
}


class LazyTable(dict[str, object]):
    """Hold a table's entries and import `vaswani`, which registers itself, when asked for one of its names.

    Parameters
    ----------
    entries : dict[str, object]
        What the table holds already.
    names : tuple[str, ...]
        The names whose look-up imports `vaswani`.
    """

    def __init__(self, entries: dict[str, object], names: tuple[str, ...]) -> None:
        super().__init__(entries)
        self.names = names

    def __contains__(self, key: object) -> bool:
        """Tell whether there is such an entry, after an attempt to make ours.

        Parameters
        ----------
        key : object
            The name that is looked up.

        Returns
        -------
        bool
            Whether the table holds it.
        """
        if key in self.names and not super().__contains__(key):
            _import_vaswani()
        return super().__contains__(key)


class WatchedSpec(ModuleSpec):
    """Tell when the module that is being loaded is done, and call what waits for it then."""

    actions: list[Callable[[ModuleType], None]]

    def __setattr__(self, name: str, value: object) -> None:
        """Notice how Python marks the module as loaded.

        Parameters
        ----------
        name : str
            The attribute that is set.
        value : object
            Its new value.
        """
        super().__setattr__(name, value)
        if name == "_initializing" and not value and self.name in sys.modules:
            for action in self.actions:
                action(sys.modules[self.name])
            self.actions.clear()


class WaitingFinder:
    """Wait for the import of a module, and call a function once it is loaded.

    Parameters
    ----------
    module_name : str
        The module to wait for.
    action : Callable[[ModuleType], None]
        The function, which gets the module.
    """

    def __init__(self, module_name: str, action: Callable[[ModuleType], None]) -> None:
        self.module_name = module_name
        self.action = action
        self.is_searching = False

    def find_spec(self, name: str, *args: Any) -> ModuleSpec | None:
        """Have the loader of the awaited module call the function when it is done.

        Parameters
        ----------
        name : str
            Name of the module that is being imported.
        *args : Any
            Where to look, for the other finders.

        Returns
        -------
        ModuleSpec | None
            How to load the module, or None to leave it to the other finders.

        Notes
        -----
        Another package's finder may ask all finders too, this one among them: while it searches, it finds nothing.
        """
        if name != self.module_name or self.is_searching:
            return None
        self.is_searching = True
        try:
            found = (finder.find_spec(name, *args) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
            if spec is not None and spec.loader is not None:
                self._act_after(spec.loader)
        except Exception:
            return None
        finally:
            self.is_searching = False
        return spec

    def _act_after(self, loader: "Loader") -> None:
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self.action(module)

        loader.exec_module = execute_and_act  # type: ignore[method-assign]


def after_import(module_name: str, action: Callable[[ModuleType], None]) -> None:
    """Call a function with a module: now, if it is loaded, and else as soon as it is.

    Parameters
    ----------
    module_name : str
        Full name of the module. It is not imported for this.
    action : Callable[[ModuleType], None]
        The function. What it raises goes to whoever imports the module.
    """
    module = sys.modules.get(module_name)
    spec: Any = getattr(module, "__spec__", None)
    if module is None:
        sys.meta_path.insert(0, WaitingFinder(module_name, action))
    elif getattr(spec, "_initializing", False):  # it is being imported at this moment, further up the stack
        spec.__class__ = WatchedSpec
        spec.actions = [*getattr(spec, "actions", []), action]
    else:
        action(module)


def install() -> None:
    """Place our entries: now, where transformers has loaded its tables, and else as soon as it does."""
    try:
        if os.environ.get("VASWANI_AUTOLOAD") == "0":
            return
        for name in TABLES:  # transformers imports torch while it loads its tables, so they may be half loaded
            after_import(name, _place_entry)
    except Exception:  # torch turns any exception of an entry point into a failing `import torch`
        return


def _place_entry(module: ModuleType) -> None:
    try:
        holder_name, table_name, our_names = TABLES[module.__name__]
        holder = module if holder_name is None else getattr(module, holder_name)
        setattr(holder, table_name, LazyTable(getattr(holder, table_name), our_names))
    except Exception:  # transformers has another layout: there is no entry, and `import vaswani` still works
        return


def _import_vaswani() -> None:
    try:
        import vaswani  # noqa: F401
    except (Exception, SystemExit) as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == "vaswani"):
            import logging

            logging.getLogger("vaswani").warning("vaswani is installed but cannot be imported: %r", error)
