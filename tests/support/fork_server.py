"""Processes of this interpreter, forked from a server that has imported everything.

A start of Python with torch, transformers, PEFT and Lightning takes ten seconds of a core; a fork
of a process that has them takes some hundredths of a second. `Popen` and `run` are those of
`subprocess` for commands of this interpreter (``[sys.executable, "-m", "mens_exp", …]``): pipes,
working directory, environment, sessions, signals and exit codes are those of a real start, and the
process is a true child of the one that asked for it.

How a fork becomes the child of the one that asked, which is not the one that forks: the server is a
child of the asking process A. It forks twice and ends the process between, and Linux gives the
orphan to A, which is its subreaper at that moment. Each forked process keeps a clean copy of itself
as its own server before it does anything else, so that what it starts is forked too.

The server runs no tensor operation and has one thread: libraries' thread pools do not survive a
fork. What a fork would share by mistake is made anew in `_become`: signal handlers and masks, open
files, random state, the environment and the working directory. Variables that libraries read while
they are imported (`READ_AT_IMPORT`) select a server of their own.

`write_stubs` makes programs ``python`` and ``mens-exp`` for shells, which pass their command on.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import itertools
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import weakref
from pathlib import Path
from typing import Any

# Variables that are read during an import: commands that differ in them need separate servers.
READ_AT_IMPORT = ("ATEN_", "BNB_", "DATASETS_", "HF_", "HUGGING", "MALLOC_", "MKL_", "NUMEXPR_")
READ_AT_IMPORT += ("ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED", "PYTORCH_", "TORCH_", "TRANSFORMERS_")
SITE = "MENS_EXP_TEST_SITE"  # a directory where a server finds installed packages
READ_AT_IMPORT += (SITE,)
SET_BY_FORKS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SET_BY_FORKS += ("PYTORCH_NVML_BASED_CUDA_CHECK",)  # Lightning sets it during its import
DEFAULTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}  # as the command line sets it
EXTERNAL = (
    "accelerate.utils",
    "bitsandbytes",
    "lightning",
    "lightning.pytorch.strategies",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "optuna",
    "peft.tuners.lora",
    "scipy.stats",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.data",
    "transformers.integrations.bitsandbytes",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "tree_sitter_rust",
    "wandb.apis.public",
    "wandb.sdk.wandb_run",
)
# Options that most tests use; the server composes them once, which saves its forks the time.
USUAL = ["model=tiny_llama", "trainer=cpu", "logger=none", "suite=none", "schedule=constant"]
USUAL += ["data=jsonl", "data.path=rows.jsonl"]
_MESSAGE = 1 << 18  # bytes per request, below the limit of a packet
_PADDING = 1 << 13  # bytes that the server's own command line leaves for those of its forks
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
_COLLAPSE = 25  # MADV_COLLAPSE, linux/mman.h
_HUGE = 2 << 20  # bytes of a huge page on x86 and, with pages of 4 KiB, on ARM
_HANDLED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
_HANDLED |= {signal.SIGUSR2, signal.SIGALRM}
_PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}


class ForkServer:
    """A server and the connection to it; it exits when the owning process exits."""

    def __init__(
        self,
        connection,
        at=None,
        process=None,
        *,
        is_ready=False,
    ):
        self.at = at  # name of the socket for stubs, not of a file
        self._connection = connection
        self._process = process
        self._lock = threading.Lock()
        self._is_ready = is_ready

    @classmethod
    def start(cls, environment, log):
        """Start a server as a real process; it imports in the background."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        at = f"mens_exp_fork_{uuid.uuid4().hex}"
        code = "import fork_server; fork_server.main()"
        with theirs, log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), at, " " * _PADDING],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                cwd="/",  # not the test's own, whose conf/ may be broken on purpose
                env={
                    **DEFAULTS,
                    **{k: v for k, v in environment.items() if not k.startswith("COVERAGE")},
                    "PYTHONPATH": os.pathsep.join(
                        [
                            str(Path(__file__).parent),
                            _source(),
                            *filter(None, [environment.get(SITE)]),
                        ]
                    ),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                },
            )
        return cls(ours, at, process)

    def wait_until_ready(self):
        """Wait until the imports are done.

        Raises:
            RuntimeError: the server has ended; the message ends with the end of its log.
        """
        if not self._is_ready and self._connection.recv(_MESSAGE) != b"ready":
            raise _ended()
        self._is_ready = True

    def close(self):
        """Stop the server."""
        self._connection.close()
        if self._process is not None:
            self._process.wait()

    def fork(self, request, files):
        """Fork a process that becomes a child of this one.

        Returns:
            Its process ID.
        """
        global forked  # one per process
        with self._lock:
            forked += 1
            self.wait_until_ready()
            libc = ctypes.CDLL(None)
            libc.prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], files)
                answer = self._connection.recv(_MESSAGE)
            finally:
                libc.prctl(_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise _ended()
        return int(answer)


forked = 0  # forked by this process
_servers = {}
_log = Path(os.devnull)
_is_fork = False
_temporary = []  # directories that libraries create during their import
_before_each = ""


def keep_log(path):
    """Log errors of this process's servers to a file."""
    global _log  # one per process, like the servers
    _log = path


def execute_before_each(source):
    """Execute this code first in each process that this one forks, and in their forks."""
    global _before_each  # as above
    _before_each = source


def _ended():
    said = _log.read_text("utf-8", errors="replace") if _log.is_file() else ""
    return RuntimeError(f"the fork server has ended:\n{said[-2000:]}")


def server_for(environment):
    """Return the server for an environment; the first request starts it."""
    key = _key(environment)
    if key not in _servers:
        _servers[key] = ForkServer.start(environment, _log)
    return _servers[key]


def end_servers():
    """Stop the servers of this process."""
    for server in _servers.values():
        server.close()
    _servers.clear()


def _source():
    """Return the directory from which this process imports the package."""
    import mens_exp

    return str(Path(mens_exp.__file__).parents[1])


def _key(environment):
    ours = {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}
    return tuple(sorted((k, v) for k, v in (DEFAULTS | ours).items() if k not in SET_BY_FORKS))


_EXECUTE = inspect.signature(subprocess.Popen._execute_child)


class Popen(subprocess.Popen):
    """`subprocess.Popen` for commands of this interpreter, forked instead of started.

    Args:
        before: source text that the process executes before its command.
    """

    def __init__(self, args, *more, before=None, **options):
        self._before = before
        super().__init__(args, *more, **options)

    def _execute_child(self, *args, **options):
        bound = _EXECUTE.bind(self, *args, **options).arguments
        command = [os.fspath(word) for word in bound["args"]]
        if command[0] != sys.executable or bound["preexec_fn"] or bound["pass_fds"]:
            raise ValueError(f"only commands of {sys.executable} are forked: {command}")
        environment = dict(os.environ if bound["env"] is None else bound["env"])
        ignored = [n for n in _HANDLED if signal.getsignal(n) is signal.SIG_IGN]
        request = {
            "arguments": command[1:],
            "cwd": os.path.abspath(bound["cwd"] or "."),
            "environment": environment,
            "session": bool(bound["start_new_session"]),
            "ignored": ignored,
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "before": self._before,
            "before_each": _before_each,
        }
        ends = bound["p2cread"], bound["c2pwrite"], bound["errwrite"]
        files = [number if end == -1 else end for number, end in enumerate(ends)]
        if _is_fork and _key(environment) not in _servers:
            super()._execute_child(*args, **options)  # a real start is cheaper than a server
            return
        try:
            self.pid = server_for(environment).fork(request, files)
            self._child_created = True
        finally:
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(bound[name] for name in pipes))


def run(
    command,
    *,
    check=False,
    capture_output=False,
    timeout=None,
    text_input=None,
    **options,
):
    """Run a command of this interpreter and wait, like `subprocess.run`."""
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    if text_input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(text_input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


STUB = """#!{python} -IS
import json, os, signal, socket, sys
arguments = {first!r} + sys.argv[1:]
code = arguments[:1] == ["-c"] and "mens_exp" in arguments[1]
if not code and not (arguments[:1] == ["-m"] and arguments[1].startswith("mens_exp")):
    os.execv({python!r}, [{python!r}, *arguments])
request = dict(arguments=arguments, cwd=os.getcwd(), environment=dict(os.environ), session=False)
request.update(ignored=[], blocked=[], before=None, before_each={before_each!r})
signal.pthread_sigmask(signal.SIG_BLOCK, {signals!r})  # until they can be passed on
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect("\\0" + {at!r})
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    pid = int(connection.recv(100))
    for number in {signals!r}:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signals!r})
    code = int(connection.recv(100))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def write_stubs(directory):
    """Write the programs ``python``, ``python3`` and ``mens-exp`` for the PATH of a shell.

    They fork commands of mens_exp and execute any other.
    """
    server = server_for(dict(os.environ))
    server.wait_until_ready()
    for name in ("python", "python3", "mens-exp"):
        first = ["-m", "mens_exp"] if name == "mens-exp" else []
        numbers = sorted(int(number) for number in _HANDLED)
        text = STUB.format(
            python=sys.executable,
            first=first,
            at=server.at,
            signals=numbers,
            before_each=_before_each,
        )
        (directory / name).write_text(text, encoding="utf-8")
        (directory / name).chmod(0o755)
    return directory


def main():
    """Import everything, then serve requests; each fork leaves the loop to run its command."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    at = sys.argv[2]
    sys.path[:] = [place for place in sys.path if place not in ("", str(Path(__file__).parent))]
    gc.disable()  # collections would take a sixth of the import time; forks enable them
    _import_everything()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports: a fork would copy one of them"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + at)
    listener.listen()
    gc.collect()
    # type() only: isinstance() would read __class__, which some objects compute.
    _temporary[:] = [o for o in gc.get_objects() if type(o) is tempfile.TemporaryDirectory]
    gc.freeze()
    _use_huge_pages()
    connection.send(b"ready")
    asked = _serve(connection, listener)
    while asked is not None:
        asked = _become(*asked)


def _use_huge_pages():
    """Collapse the memory of the imports into 2 MiB pages, which fork four times as fast.

    A system that cannot (Linux before 6.1) says so, and all stays as it is.
    """
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text("ascii").splitlines():
        span, access, *_, name = line.split()
        if "w" in access and name in ("0", "[heap]"):  # inode or name: anonymous memory
            begin, end = (int(number, 16) for number in span.split("-"))
            begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
            if begin < end:
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _COLLAPSE)


def _import_everything():
    """Import the libraries, and this package whole."""
    for name in EXTERNAL:
        importlib.import_module(name)
    import mens_exp

    for found in pkgutil.walk_packages(mens_exp.__path__, "mens_exp."):
        if not found.name.endswith(("__main__", "vllm_engine", "training.apollo")):
            importlib.import_module(found.name)
    _spare_the_forks()


def _spare_the_forks():
    """Do what every process does once: compose, read declarations, compile templates."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from mens_exp.artifacts import provenance
    from mens_exp.config.compose import compose
    from mens_exp.config.overrides import check
    from mens_exp.config.untrusted_config import our_targets
    from mens_exp.planning.contract import contract_of
    from mens_exp.report import html

    compose([[]])  # compositions and files of conf/ are cached
    (cell,) = check(USUAL).cells
    contract_of(cell.config).record()
    our_targets()
    provenance._packages()
    get_checkpoint_conversion_mapping("llama")
    templates = html._environment()
    for name in templates.list_templates(filter_func=lambda name: name.endswith(".html.j2")):
        templates.get_template(name)


_Asked = tuple[dict[str, Any], list[int]]


def _serve(connection, listener):
    """Fork for each request until the connection is closed.

    Returns:
        In a fork its request and its standard files; in the server None.
    """
    # Signals to its group are not meant for a server. They are blocked, not ignored, because a fork
    # that ignored one before it has its own handlers would lose it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    sources = [connection] if listener is None else [connection, listener]
    while True:
        ready, _, _ = select.select(sources, [], [])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        source = connection if connection in ready else listener.accept()[0]
        message, files, _, _ = socket.recv_fds(source, _MESSAGE, 3)
        asked = json.loads(message) if message else None, files
        if source is not connection:
            if message and os.fork() == 0:
                _mind(source, files)
                return asked
            source.close()
        elif not message:
            return None
        else:
            pid = _fork_for_parent(asked[0]["session"])
            if pid is None:
                return asked
            connection.send(str(pid).encode())
        for file in files:
            os.close(file)


def _fork_for_parent(has_session):
    """Fork a process that the server's parent adopts, in a session of its own if requested.

    Returns:
        Its ID, once it can be signalled by its group; None in the fork.
    """
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        me = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == me:
            time.sleep(0.0005)
        if has_session:
            os.setsid()
        os.write(write, str(os.getpid()).encode())
        os.close(write)
        return None
    os.waitpid(between, 0)
    os.close(write)
    with open(read, "rb") as pipe:
        return int(pipe.read())


def _mind(asking, files):
    """Fork a process and report its exit to a stub; returns only in that process."""
    pid = os.fork()
    if pid == 0:
        return
    for file in files:
        os.close(file)
    asking.send(str(pid).encode())
    watch = os.pidfd_open(pid)
    if watch not in select.select([asking, watch], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # the stub has exited
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request, files):
    """Turn this fork into the requested process, run its command, and exit.

    Returns:
        What `_serve` returned, in the server of this process's own.
    """
    global _is_fork
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        kept = theirs.detach()
        _close_files_but(kept)
        _name("fork_server of", request["arguments"])
        asked = _serve(socket.socket(fileno=kept), None)
        return asked or os._exit(0)  # freeing shared memory would copy it
    theirs.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
    kept = ours.detach()
    _close_files_but(kept)
    _is_fork = True
    environment = request["environment"]
    os.environ.clear()
    os.environ.update(environment)
    _servers[_key(environment)] = ForkServer(socket.socket(fileno=kept), is_ready=True)
    os.chdir(request["cwd"])
    _reset(request)
    _name(sys.executable, request["arguments"])
    if environment.keys() & {"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"}:
        importlib.import_module("coverage").process_startup(force=True)
    for source in (request["before_each"], request["before"]):
        exec(source or "", {})
    execute_before_each(request["before_each"])
    return _end(_code_of(request["arguments"]))


def _close_files_but(kept):
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX") if kept < 1024 else kept + 1024)


def _reset(request):
    """Reset state that a fork shares with its parent to that of a new process."""
    for number in _HANDLED:
        is_ignored = number in request["ignored"]
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _PYTHON_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _open_standard_streams()
    tempfile.tempdir = None
    for finalizer in weakref.finalize._registry.values():
        finalizer.atexit = False  # the server's exit handlers, which must not run in each fork
    for directory in _temporary:
        directory.__init__()
    time.tzset()
    importlib.invalidate_caches()
    random.seed()
    import numpy as np
    import torch

    from mens_exp.artifacts import host

    np.random.seed()  # the global generators, which a new process seeds from the system
    torch.seed()
    host.Popen = Popen
    threads = request["environment"].get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(threads) if threads.isdigit() else len(os.sched_getaffinity(0)))
    gc.enable()


def _open_standard_streams():
    """Open standard streams as Python does; the old ones stay open for log handlers."""
    is_buffered = not os.environ.get("PYTHONUNBUFFERED")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        file = open(  # noqa: SIM115  # it is the process's own
            number, "wb" if number else "rb", buffering=-1 if is_buffered else 0, closefd=False
        )
        new = io.TextIOWrapper(
            file,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n" if number else None,
            line_buffering=is_buffered and (number == 2 or os.isatty(number)),
            write_through=not is_buffered,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    wraps = sys.modules.get("wandb.sdk.lib.console_capture")
    if wraps is not None:  # wraps the streams that exist at its import
        importlib.reload(wraps)


def _name(first, arguments):
    """Show a command in the process table, since some code finds processes by name."""
    fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    text = b"\0".join(word.encode() for word in [first, *arguments])[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _code_of(arguments):
    """Run a command; return Python's exit code for how it ended."""
    try:
        _execute(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code):
    """Exit as Python does, but without freeing memory, which would copy it."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _execute(arguments):
    """Do what ``python`` does with these arguments."""
    flags = list(itertools.takewhile(lambda word: word in {"-P", "-S"}, arguments))
    is_safe = "-P" in flags
    kind, *rest = arguments[len(flags) :]
    reach = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:0] = reach
    sys.orig_argv = [sys.executable, *arguments]
    if kind == "-m":
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        sys.argv = rest
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        if not is_safe:
            sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        scope = type(sys)("__main__")
        sys.modules["__main__"] = scope
        exec(compile(rest[0], "<string>", "exec"), scope.__dict__)
    else:
        if not is_safe:
            sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
