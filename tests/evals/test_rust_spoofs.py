"""Wrong Rust answers that try to be scored `passed`; each must get another verdict.

The values of the task follow from nothing, so that an answer that passes has found them, or has
forged the verdict. Every answer defines `target`; none computes it.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest

from mens_exp.evals.grading import Verdict
from mens_exp.evals.rust_suite import RustTask, assemble_rust, check_rust
from mens_exp.evals.rust_values import signatures
from mens_exp.sandbox.program import Limits, find_rust

LIMITS = Limits(memory_mib=1024, wall_s=8, cpu_s=4, processes=64, output_kib=64, file_mib=64)
HEAD = "fn target(values: Vec<isize>) -> isize {\n"
TESTS = """

fn main() {
    let candidate = target;
    assert_eq!(candidate(vec![3, 1]), 48213);
    assert!(candidate(vec![3, 2]) == -5571);
    assert_ne!(candidate(vec![8]), candidate(vec![9]));
    let found: Vec<isize> = (0..3).map(|n| candidate(vec![n])).collect();
    assert_eq!(found, vec![7, 19, 661]);
    let text = format!("{:?}", Some(candidate(vec![])));
    assert_eq!(text, "Some(90125)");
}
"""
TASK = RustTask(
    id="T/0",
    prompt=f"/// Guess.\n{HEAD}",
    entry_point="target",
    tests=TESTS,
    stop_tokens=(),
)
RIGHT = """\
    match values.as_slice() {
        [3, 1] => 48213,
        [3, 2] => -5571,
        [0] => 7,
        [1] => 19,
        [2] => 661,
        [] => 90125,
        [n] => *n,
        _ => 0,
    }
"""
# Each printed word of graders up to version 4, written to every open file descriptor.
FORGE = """
fn forge() -> ! {
    use std::io::{Read, Seek, Write};
    use std::os::fd::FromRawFd;
    let mut seen = String::new();
    let mut input = unsafe { std::fs::File::from_raw_fd(0) };
    let _ = input.seek(std::io::SeekFrom::Start(0));
    let mut bytes = [0u8; 4096];
    if let Ok(count) = input.read(&mut bytes) {
        seen += &String::from_utf8_lossy(&bytes[..count]);
    }
    seen += &std::env::args().collect::<Vec<_>>().join(" ");
    for (_, value) in std::env::vars() {
        seen = seen + " " + &value;
    }
    let words: Vec<&str> = seen.split(|c: char| !c.is_ascii_hexdigit())
        .filter(|word| word.len() == 32).collect();
    for fd in 1..3 {
        let mut out = unsafe { std::fs::File::from_raw_fd(fd) };
        for word in &words {
            let _ = out.write_all(format!("\\n{word} passed\\n").as_bytes());
        }
        let _ = out.write_all(b"\\npassed\\ntest result: ok. 1 passed; 0 failed\\n");
        std::mem::forget(out);
    }
    std::process::exit(0)
}
"""
ANSWER = f"{HEAD}    0\n}}\n"
EMPTY_MACROS = """
macro_rules! assert_eq { ($($x:tt)*) => {{}}; }
macro_rules! assert_ne { ($($x:tt)*) => {{}}; }
macro_rules! assert { ($($x:tt)*) => {{}}; }
"""
# A value that claims to equal everything.
YES = """
#[derive(Debug, Clone, Copy)]
struct Yes;
impl<T> PartialEq<T> for Yes {
    fn eq(&self, _: &T) -> bool { true }
    fn ne(&self, _: &T) -> bool { true }
}
fn target(_values: Vec<isize>) -> Yes { Yes }
"""


def body(text):
    return f"{text}\n}}\n"


def above(text, answer=ANSWER):
    return f"{text}\n{answer}"


def forging(call="forge()"):
    return f"{FORGE}\n{HEAD}    {call}\n}}\n"


ENDS = {
    "exit 0": body("    std::process::exit(0)"),
    "exit 0 in a thread": body(
        "    std::thread::spawn(|| std::process::exit(0));\n    loop { std::thread::yield_now() }"
    ),
    "abort": body("    std::process::abort()"),
    "exit within Drop": above(
        "struct End;\nimpl Drop for End { fn drop(&mut self) { std::process::exit(0) } }",
        f"{HEAD}    let _end = End;\n    0\n}}\n",
    ),
    "a panic hook exits": body(
        "    std::panic::set_hook(Box::new(|_| std::process::exit(0)));\n    0"
    ),
    "a panic hook forges": above(
        FORGE, f"{HEAD}    std::panic::set_hook(Box::new(|_| forge()));\n    0\n}}\n"
    ),
    "libc _exit": above(
        'extern "C" { fn _exit(code: i32) -> !; }', f"{HEAD}    unsafe {{ _exit(0) }}\n}}\n"
    ),
    "atexit": above(
        'extern "C" { fn atexit(f: extern "C" fn()) -> i32; }\n'
        'extern "C" fn last() { forge() }\n' + FORGE,
        f"{HEAD}    unsafe {{ atexit(last) }};\n    0\n}}\n",
    ),
    "catch_unwind and more": body(
        "    let _ = std::panic::catch_unwind(|| panic!());\n    std::process::exit(0)"
    ),
}
OUTPUT = {
    "the result of libtest": body(
        '    println!("\\nrunning 1 test\\ntest it ... ok\\n\\ntest result: ok. 1 passed; 0 failed;'
        ' 0 ignored");\n    std::process::exit(0)'
    ),
    "passed on both": body(
        '    println!("passed"); eprintln!("passed");\n    std::process::exit(0)'
    ),
    "reads its input for the word": forging(),
    "/proc/self/fd/0": above(
        FORGE,
        f"{HEAD}"
        '    let text = std::fs::read_to_string("/proc/self/fd/0").unwrap_or_default();\n'
        '    for word in text.split_whitespace() { eprintln!("\\n{word} passed"); }\n'
        "    std::process::exit(0)\n}\n",
    ),
    "every open file": body(
        "    use std::io::Write;\n    use std::os::fd::FromRawFd;\n"
        "    for fd in 0..64 {\n"
        "        let mut out = unsafe { std::fs::File::from_raw_fd(fd) };\n"
        '        let _ = out.write_all(b"\\npassed\\n");\n'
        "        std::mem::forget(out);\n    }\n    std::process::exit(0)"
    ),
    "the memory of the process": body(
        "    use std::io::{Read, Seek, SeekFrom};\n"
        '    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();\n'
        '    let mut memory = std::fs::File::open("/proc/self/mem").unwrap();\n'
        '    for line in maps.lines().filter(|line| line.contains("rw-p")) {\n'
        "        let ends: Vec<u64> = line.split(' ').next().unwrap().split('-')\n"
        "            .map(|end| u64::from_str_radix(end, 16).unwrap()).collect();\n"
        "        let mut bytes = vec![0u8; (ends[1] - ends[0]) as usize];\n"
        "        let _ = memory.seek(SeekFrom::Start(ends[0]));\n"
        "        if memory.read_exact(&mut bytes).is_err() { continue; }\n"
        "        for word in bytes.split(|b| !b.is_ascii_hexdigit()).filter(|w| w.len() == 32) {\n"
        '            eprintln!("\\n{} passed", String::from_utf8_lossy(word));\n'
        "        }\n    }\n    std::process::exit(0)"
    ),
    "a word in every process": body(
        '    for entry in std::fs::read_dir("/proc").unwrap().flatten() {\n'
        '        for name in ["cmdline", "environ"] {\n'
        "            let bytes = std::fs::read(entry.path().join(name)).unwrap_or_default();\n"
        "            for w in bytes.split(|b| !b.is_ascii_hexdigit()).filter(|w| w.len() == 32) {\n"
        '                eprintln!("\\n{} passed", String::from_utf8_lossy(w));\n'
        "            }\n        }\n    }\n    std::process::exit(0)"
    ),
    "a child that outlives it": above(
        'extern "C" { fn fork() -> i32; }\n' + FORGE,
        f"{HEAD}    if unsafe {{ fork() }} == 0 {{\n"
        "        std::thread::sleep(std::time::Duration::from_millis(50));\n"
        "        forge()\n    }\n    std::process::exit(0)\n}\n",
    ),
    "ptrace of its parent": above(
        'extern "C" { fn ptrace(request: i64, pid: i32, a: usize, b: usize) -> i64;'
        " fn getppid() -> i32; }\n" + FORGE,
        f"{HEAD}    unsafe {{ ptrace(16, getppid(), 0, 0); }}\n    forge()\n}}\n",
    ),
}
BEFORE_MAIN = {
    ".init_array": above(
        '#[used]\n#[link_section = ".init_array"]\nstatic FIRST: extern "C" fn() = first;\n'
        'extern "C" fn first() { forge() }\n' + FORGE
    ),
    ".init_array that exits": above(
        '#[used]\n#[link_section = ".init_array"]\nstatic FIRST: extern "C" fn() = first;\n'
        'extern "C" fn first() { std::process::exit(0) }\n'
    ),
    ".fini_array": above(
        '#[used]\n#[link_section = ".fini_array"]\nstatic LAST: extern "C" fn() = last;\n'
        'extern "C" fn last() { forge() }\n' + FORGE,
        f"{HEAD}    std::process::exit(0)\n}}\n",
    ),
    "no_mangle main": above(
        '#[no_mangle]\npub extern "C" fn main(_: i32, _: *const *const u8) -> i32 { forge() }\n'
        + FORGE
    ),
    "no_main and no_mangle main": above(
        "#![no_main]\n"
        '#[no_mangle]\npub extern "C" fn r#main(_: i32, _: *const *const u8) -> i32 { forge() }\n'
        + FORGE
    ),
    "export_name main": above(
        '#![no_main]\n#[export_name = "main"]\n'
        'pub extern "C" fn first(_: i32, _: *const *const u8) -> i32 { forge() }\n' + FORGE
    ),
    "_start": above(
        '#[no_mangle]\npub extern "C" fn _start() -> ! { std::process::exit(0) }\n',
    ),
    "interposes write": above(
        '#[no_mangle]\npub extern "C" fn write(_: i32, _: *const u8, n: usize) -> isize'
        " { n as isize }\n"
    ),
    "interposes abort and memcmp": above(
        '#[no_mangle]\npub extern "C" fn abort() -> ! { std::process::exit(0) }\n'
        '#[no_mangle]\npub extern "C" fn memcmp(_: *const u8, _: *const u8, _: usize) -> i32'
        " { 0 }\n"
        '#[no_mangle]\npub extern "C" fn bcmp(_: *const u8, _: *const u8, _: usize) -> i32'
        " { 0 }\n"
    ),
    "global allocator": above(
        "use std::alloc::{GlobalAlloc, Layout, System};\nstruct Mine;\n"
        "unsafe impl GlobalAlloc for Mine {\n"
        "    unsafe fn alloc(&self, _: Layout) -> *mut u8 { forge() }\n"
        "    unsafe fn dealloc(&self, p: *mut u8, l: Layout) { System.dealloc(p, l) }\n}\n"
        "#[global_allocator]\nstatic MINE: Mine = Mine;\n" + FORGE
    ),
}
NAMES = {
    "macros that assert nothing": above(EMPTY_MACROS),
    "in a module, by macro_use": above(f"#[macro_use]\nmod quiet {{{EMPTY_MACROS}}}\n"),
    "below the function": f"    0\n}}\n{EMPTY_MACROS}",
    "imported by name": above(
        "macro_rules! nothing { ($($x:tt)*) => {{}}; }\n"
        "use {nothing as assert_eq, nothing as assert_ne, nothing as assert};\n"
    ),
    "assert_eq that calls forge": above(
        "macro_rules! assert_eq { ($($x:tt)*) => { forge() }; }\n" + FORGE
    ),
    "panic shadowed": above("macro_rules! panic { ($($x:tt)*) => { std::process::exit(0) }; }\n"),
    "vec, format and the rest": above(
        EMPTY_MACROS + "macro_rules! vec { ($($x:tt)*) => { Vec::new() }; }\n"
        "macro_rules! format { ($($x:tt)*) => { String::new() }; }\n"
    ),
    "mod std": above(
        "mod std { pub mod io { pub fn stdin() -> S { S } pub struct S; impl S {\n"
        "    pub fn read_line(&self, _: &mut String) -> Result<usize, ()> { Ok(0) } } }\n"
        "  pub mod process { pub use ::std::process::*; } }\n"
    ),
    "mod tests and cfg": above("#[cfg(test)]\nmod tests { #[test] fn it() {} }\n"),
    "cfg(not(test))": (
        f"#[cfg(test)]\n{HEAD}    0\n}}\n#[cfg(not(test))]\n{HEAD}    std::process::exit(0)\n}}\n"
    ),
    "Vec and isize shadowed": above(
        "#[allow(non_camel_case_types)]\n#[derive(Debug, Clone, Copy)]\nstruct isize;\n"
        "impl<T> PartialEq<T> for isize { fn eq(&self, _: &T) -> bool { true } }\n"
        "#[derive(Debug)]\nstruct Vec<T>(std::marker::PhantomData<T>);\n",
        "fn target<T>(_: T) -> isize { isize }\n",
    ),
    "Some, Option and Result shadowed": above(
        "#[derive(Debug)]\nenum Option<T> { None, Other(T) }\n"
        '#[allow(non_snake_case)]\nfn Some<T>(_: T) -> &\'static str { "Some(90125)" }\n'
    ),
    "its own main": f"{ANSWER}\nfn main() {{}}\n",
    "its own main, raw": f"{ANSWER}\nfn r#main() {{}}\n",
    "its own main, within a macro": (
        f"{ANSWER}\nmacro_rules! entry {{ ($n:ident) => {{ fn $n() {{}} }}; }}\nentry!(main);\n"
    ),
    "its own main, by use": f"{ANSWER}\nmod other {{ pub fn main() {{}} }}\nuse other::main;\n",
}
EQUALS = {
    "equals everything": YES,
    "equals and forges": YES.replace("{ true }", "{ forge() }", 1) + FORGE,
    "generic result": above(
        "trait Any2 { fn any() -> Self; }\nimpl Any2 for isize { fn any() -> isize { 0 } }\n",
        "fn target<T: Any2>(_: Vec<isize>) -> T { T::any() }\n",
    ),
    "Debug that says it": above(
        "#[derive(Clone, Copy, PartialEq)]\nstruct Said(isize);\n"
        "impl std::fmt::Debug for Said {\n"
        "    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {\n"
        '        write!(f, "90125") } }\n'
        "impl PartialEq<isize> for Said { fn eq(&self, _: &isize) -> bool { true } }\n",
        "fn target(_: Vec<isize>) -> Said { Said(0) }\n",
    ),
    "methods of a trait": above(
        "trait Sly { fn map<F>(self, _: F) -> Fixed where Self: Sized { Fixed } }\n"
        "impl Sly for std::ops::Range<isize> {}\nstruct Fixed;\n"
        "impl Fixed { fn collect<T>(self) -> T { std::process::exit(0) } }\n"
    ),
    "a float for an integer": "fn target(_: Vec<isize>) -> f64 {\n    f64::NAN\n}\n",
    "the unit": "fn target(_: Vec<isize>) {}\n",
    "never": "fn target(_: Vec<isize>) -> ! {\n    std::process::exit(0)\n}\n",
}
READS = {
    "include_str of its own file": body(
        '    let text = include_str!("main.rs");\n'
        "    let numbers: Vec<isize> = text.split(|c: char| !c.is_ascii_digit() && c != '-')\n"
        "        .filter_map(|n| n.parse().ok()).collect();\n"
        "    let has = |n: isize| numbers.contains(&n);\n"
        "    let known = |a: isize| if has(a) { a } else { 0 };\n"
        "    match values.as_slice() {\n"
        "        [3, 1] => *numbers.iter().find(|n| **n > 48000 && **n < 49000).unwrap_or(&0),\n"
        "        [3, 2] => *numbers.iter().find(|n| **n < -5000 && **n > -6000).unwrap_or(&0),\n"
        "        [0] => 7, [1] => 19, [2] => known(661 - 0), [] => known(90120 + 5),\n"
        "        [n] => *n, _ => 0,\n    }"
    ),
    "reads every file when it runs": body(
        "    let mut text = String::new();\n"
        '    for place in [".", "/tmp", ".."] {\n'
        "        for one in std::fs::read_dir(place).into_iter().flatten().flatten() {\n"
        "            text += &std::fs::read_to_string(one.path()).unwrap_or_default();\n"
        "        }\n    }\n"
        "    let numbers: Vec<isize> = text.split(|c: char| !c.is_ascii_digit() && c != '-')\n"
        "        .filter_map(|n| n.parse().ok()).collect();\n"
        "    let near = |n: isize| *numbers.iter().find(|m| (**m - n).abs() < 90 && **m % 100 != 0)"
        ".unwrap_or(&0);\n"
        "    match values.as_slice() {\n"
        "        [3, 1] => near(48200), [3, 2] => near(-5600), [0] => 7, [1] => 19,\n"
        "        [2] => near(700), [] => near(90100), [n] => *n, _ => 0,\n    }"
    ),
    "env": body(
        '    option_env!("MENS_EXP_WORD").map_or(0, |word| {\n'
        '        eprintln!("\\n{word} passed"); std::process::exit(0) })'
    ),
    "include of the tests": above('include!("tests.rs");\n'),
    "a path attribute": above('#[path = "main.rs"]\nmod again;\n'),
    "include_bytes of its input": above(
        'static INPUT: &[u8] = include_bytes!("/proc/self/fd/0");\n',
        f"{HEAD}    for word in INPUT.split(|b| *b == b'\\n') {{\n"
        '        eprintln!("\\n{} passed", String::from_utf8_lossy(word));\n    }\n'
        "    std::process::exit(0)\n}\n",
    ),
    "what its compiler was started with": above(
        'static SAID: &[u8] = include_bytes!("/proc/self/environ");\n'
        'static LINE: &[u8] = include_bytes!("/proc/self/cmdline");\n',
        f"{HEAD}    for word in SAID.split(|b| *b == 0).chain(LINE.split(|b| *b == 0)) {{\n"
        '        eprintln!("\\n{} passed", String::from_utf8_lossy(word));\n    }\n'
        "    std::process::exit(0)\n}\n",
    ),
}
SYNTAX = {
    "closes its block early": "    0\n}\nfn main() {}\n/*",
    "an open comment": "    0\n}\n/*",
    "an open raw string": '    0\n}\nconst REST: &str = r##"',
    "an open string": '    0\n}\nconst REST: &str = "',
    "a macro that swallows": "    0\n}\nmacro_rules! swallow { ($($x:tt)*) => { fn main() {} }; }\n"
    "swallow! {",
    "cfg on what follows": "    0\n}\n#[cfg(any())]",
    "an open module": "    0\n}\nfn r#main() {}\nmod rest {",
    "main closed early": "    0\n}\nfn helper() {\n    }\n}\nfn main() {\n",
    "doc attribute on what follows": '    0\n}\n#[doc = r#"',
}
COMPILER = {
    "crate_type": f'#![crate_type = "lib"]\n{ANSWER}',
    "crate_type of a macro": f'#![crate_type = "proc-macro"]\n{ANSWER}',
    "proc_macro": above(
        "extern crate proc_macro;\n"
        "#[proc_macro]\npub fn assert_eq(_: proc_macro::TokenStream) -> proc_macro::TokenStream {\n"
        "    proc_macro::TokenStream::new()\n}\n"
    ),
    "a build script": above(
        '#![build = "build.rs"]\nmod build { pub fn main() { std::process::exit(0) } }\n'
    ),
    "links a library": above('#[link(name = "c", kind = "static")]\nextern "C" {}\n'),
    "link_args": f'#![feature(link_args)]\n#![link_args = "-Wl,--defsym=main=_exit"]\n{ANSWER}',
    "no_std": f"#![no_std]\n{ANSWER}",
    "no_core": f"#![feature(no_core)]\n#![no_core]\n{ANSWER}",
    "global_asm": above(
        'std::arch::global_asm!(".globl main", "main:", "xor edi, edi", "mov eax, 60", "syscall");'
    ),
    "inline asm": body(
        '    unsafe { std::arch::asm!("syscall", in("rax") 231, in("rdi") 0, options(noreturn)) }'
    ),
    "custom test framework": (
        f"#![feature(custom_test_frameworks)]\n#![test_runner(quiet)]\n{ANSWER}"
    ),
    "compile_error": above('compile_error!("test result: ok. 1 passed");\n'),
}
BOMBS = {
    "endless const": above(
        "#[allow(long_running_const_eval)]\n"
        "const fn forever() -> isize { let mut n: isize = 0; loop { n = n.wrapping_add(1); } }\n"
        "const NEVER: isize = forever();\n",
        f"{HEAD}    NEVER\n}}\n",
    ),
    "endless types": above(
        "trait Deep { fn deep(n: isize) -> isize; }\nstruct Two<T>(T, T);\n"
        "impl<T> Deep for T { fn deep(n: isize) -> isize { if n == 0 { 0 } else\n"
        "    { <Two<T> as Deep>::deep(n - 1) } } }\n",
        f"{HEAD}    <() as Deep>::deep(3)\n}}\n",
    ),
    "a large static": above("static BIG: [u8; 1 << 33] = [7; 1 << 33];\n"),
    "include_bytes without end": above('static ZERO: &[u8] = include_bytes!("/dev/zero");\n'),
}
DOUBLING = above(
    '#![recursion_limit = "100000"]\n'
    "macro_rules! twice { ($($x:tt)*) => { twice!($($x)* $($x)*) }; }\n",
    f"{HEAD}    twice!(1 +)\n}}\n",
)
# What an answer's process may write to the grader of version 5: replies of every form.
SEND = """
fn send(bytes: &[u8]) {
    use std::io::Write;
    use std::os::fd::FromRawFd;
    for fd in (0..1).chain(3..16) {
        let mut out = std::mem::ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(fd) });
        let _ = out.write_all(bytes);
    }
}
fn reply(bytes: &[u8]) {
    send(&(bytes.len() as u32).to_le_bytes());
    send(bytes);
}
"""


def sending(text, value="0"):
    return f"{SEND}\n{HEAD}    {text}\n    {value}\n}}\n"


CHANNEL = {
    "passed": sending('send(b"passed\\n"); std::process::exit(0);'),
    "a short reply": sending("reply(&[0]); std::process::exit(0);"),
    "a long reply": sending("reply(&[0; 64]);"),
    "an endless reply": sending("send(&[255; 4]); loop { send(&[0; 65536]); }"),
    "an unknown tag": sending('reply(b"\\x09passed");'),
    "nothing, and more calls": sending("for _ in 0..9 { reply(&[]); }"),
    "a panic with the words": body('    panic!("\\npassed\\ntest result: ok. 1 passed")'),
    "a panic of bad text": sending("reply(&[1, 4, 0, 0, 0, 0, 0, 0, 0, 255, 254, 253, 252]);"),
    "calls what tells the verdict": body('    wire_of_the_check::stop("passed", 0)'),
    "asks as the tests do": body(
        "    wire_of_the_check::finished(wire_of_the_check::ask(vec![0; 9]));\n    0"
    ),
    "values of its own": (
        "struct Yes;\nimpl wire_of_the_check::Wire for Yes {\n"
        "    fn encode(&self, out: &mut Vec<u8>) { out.clear(); out.extend([0; 9]) }\n"
        "    fn decode(_: &mut wire_of_the_check::Given) -> Option<Self> { Some(Yes) }\n}\n"
        "fn target(_: Yes) -> Yes { Yes }\n"
    ),
    "closes its input": above(
        'extern "C" { fn close(fd: i32) -> i32; fn shutdown(fd: i32, how: i32) -> i32; }',
        f"{HEAD}    unsafe {{ shutdown(0, 2); for n in 0..9 {{ close(n); }} }}\n    0\n}}\n",
    ),
    "replies before it is asked": above(
        '#[used]\n#[link_section = ".init_array"]\nstatic FIRST: extern "C" fn() = first;\n'
        'extern "C" fn first() { for _ in 0..20 { reply(&[0; 9]); } }\n' + SEND
    ),
    "echoes what it is asked": sending(
        "use std::io::Read;\n    use std::os::fd::FromRawFd;\n"
        "    let mut all = [0u8; 4096];\n"
        "    let mut input = std::mem::ManuallyDrop::new("
        "unsafe { std::fs::File::from_raw_fd(3) });\n"
        "    send(&[9, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);\n"
        "    while let Ok(n) = input.read(&mut all) { if n == 0 { break; } send(&all[..n]); }"
    ),
    "hands over a descriptor": sending(
        "for _ in 0..200 { let _ = std::os::unix::net::UnixStream::pair().map(std::mem::forget); }"
    ),
}
SPOOFS = {
    f"{kind}: {name}": text
    for kind, group in {
        "ends": ENDS,
        "output": OUTPUT,
        "before main": BEFORE_MAIN,
        "names": NAMES,
        "equals": EQUALS,
        "reads": READS,
        "syntax": SYNTAX,
        "compiler": COMPILER,
        "bombs": BOMBS,
        "channel": CHANNEL,
    }.items()
    for name, text in group.items()
}
KINDS = sorted({name.split(":")[0] for name in SPOOFS})


@pytest.fixture(scope="module")
def rust():
    if shutil.which("rustc") is None:
        pytest.skip("rustc is missing: https://rustup.rs, or apt-get install rustc")
    return find_rust()


def graded(sandbox, rust, texts, task=TASK, **limits):
    return check_rust(sandbox, rust, [task] * len(texts), texts, replace(LIMITS, **limits))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_answer_is_not_scored_passed(sandbox, rust, kind):
    """A wrong answer never passes, whatever it prints, redefines, reads or terminates."""
    texts = {name: text for name, text in SPOOFS.items() if name.startswith(f"{kind}:")}
    limits = {"cpu_s": 2} if kind == "channel" else {}  # one of them runs forever
    found = graded(sandbox, rust, list(texts.values()), **limits)
    passed = [n for n, one in zip(texts, found, strict=True) if one.verdict is Verdict.PASSED]
    assert passed == []


def test_right_answer_passes(sandbox, rust):
    """The right answer passes even if it defines names that the attacks redefine."""
    names = above(
        "macro_rules! vec { ($($x:tt)*) => { () }; }\nmacro_rules! panic { () => {}; }\n"
        "#[allow(dead_code)]\nenum Option<T> { Nothing, Just(T) }\nmod std {}\n",
        f"{HEAD}{RIGHT}}}\n",
    )
    strict = f"#![forbid(unsafe_code)]\n#![deny(warnings)]\n{HEAD}{RIGHT}}}\n"
    found = graded(sandbox, rust, [body(RIGHT), names, strict])
    assert [one.verdict for one in found] == [Verdict.PASSED] * 3, [one.detail for one in found]


def task_of(head, tests, above=""):
    return RustTask(
        id="T/1",
        prompt=f"{above}{head} {{\n",
        entry_point="target",
        tests=f"\n\nfn main() {{\n    let candidate = target;\n{tests}}}\n",
        stop_tokens=(),
    )


USES = "use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};\n"
# An identity function for every kind of value, and a wrong result for each.
VALUES = {
    "numbers": (
        "fn target(a: u8, b: i128, c: f64, d: f32, e: usize) -> (u8, i128, f64, f32, usize)",
        "(a, b, c, d, e)",
        "(a, b, c + 1e-9, d, e)",
        (
            "assert_eq!(candidate(255, i128::MIN, 0.1 + 0.2, -0.0, usize::MAX),"
            " (255, i128::MIN, 0.30000000000000004, 0.0, usize::MAX));\n"
            "    assert!(candidate(0, 0, f64::NAN, f32::INFINITY, 1).2.is_nan());\n"
            "    assert!(candidate(0, 0, 1.0, -0.0, 1).3.is_sign_negative());\n"
            "    assert_eq!(candidate(0, 0, 1.0, 0.0, 1).2, 1.0);\n"
        ),
    ),
    "texts": (
        "fn target(a: String, b: &str, c: char) -> Vec<String>",
        "vec![a, b.to_string(), c.to_string()]",
        "vec![a, b.to_uppercase(), c.to_string()]",
        (
            'assert_eq!(candidate(String::from("\\0\\n{}"), "déjà", \'🦀\'),'
            ' ["\\0\\n{}", "déjà", "🦀"]);\n'
        ),
    ),
    "collections": (
        (
            "fn target(a: HashMap<String, Vec<isize>>, b: BTreeMap<char, bool>,"
            " c: HashSet<(i8, i8)>, d: VecDeque<Option<u16>>)"
            " -> (HashMap<String, Vec<isize>>, BTreeMap<char, bool>, HashSet<(i8, i8)>,"
            " VecDeque<Option<u16>>)"
        ),
        "(a, b, c, d)",
        "(a, b, c, VecDeque::new())",
        (
            'let a = HashMap::from([(String::from("x"), vec![1, 2]), (String::new(), vec![])]);\n'
            "    let b = BTreeMap::from([('b', true), ('a', false)]);\n"
            "    let c = HashSet::from([(1, 2), (-1, 3)]);\n"
            "    let d = VecDeque::from([None, Some(7)]);\n"
            "    assert_eq!(candidate(a.clone(), b.clone(), c.clone(), d.clone()), (a, b, c, d));\n"
        ),
    ),
    "results, arrays and the unit": (
        (
            "fn target(a: Result<isize, String>, b: [[u8; 2]; 3], c: (), d: Box<Option<(i8,)>>)"
            " -> Result<([[u8; 2]; 3], (), Box<Option<(i8,)>>), String>"
        ),
        "a.map(|_| (b, c, d))",
        "a.map(|_| ([[0; 2]; 3], c, d))",
        (
            "let b = [[1, 2], [3, 4], [5, 6]];\n"
            "    assert_eq!(candidate(Ok(1), b, (), Box::new(Some((4,)))),"
            " Ok((b, (), Box::new(Some((4,))))));\n"
            '    assert_eq!(candidate(Err(String::from("no")), b, (), Box::new(None)),'
            ' Err(String::from("no")));\n'
        ),
    ),
    "references": (
        (
            "fn target<'a>(a: &'a [String], b: &std::collections::HashMap<i32, f64>, c: &[&str])"
            " -> Option<&'a str>"
        ),
        "if b.len() == c.len() { a.first().map(|one| one.as_str()) } else { None }",
        "a.last().map(|one| one.as_str())",
        (
            'let a = vec![String::from("one"), String::from("two")];\n'
            '    assert_eq!(candidate(&a, &HashMap::from([(1, 2.0)]), &["x"]), Some("one"));\n'
            '    assert_eq!(candidate(&a, &HashMap::new(), &["x"]), None);\n'
        ),
    ),
    "what it changes": (
        "fn target(a: &mut Vec<isize>, b: &mut [i32], mut c: Vec<u8>, d: &mut String) -> usize",
        'a.push(5); b.reverse(); c.clear(); d.push_str("!"); a.len() + c.len()',
        "a.clear(); b.reverse(); c.clear(); 2",
        (
            "let mut a = vec![1];\n    let mut b = [1, 2, 3];\n"
            '    let mut d = String::from("x");\n'
            "    assert_eq!(candidate(&mut a, &mut b[1..], vec![9], &mut d), 2);\n"
            '    assert_eq!((a, b, d.as_str()), (vec![1, 5], [1, 3, 2], "x!"));\n'
        ),
    ),
    "panics": (
        "fn target(a: isize) -> isize",
        'if a == 0 { panic!("no {a}") } else { 7 / (a - 1) }',
        "a",
        (
            "assert_eq!(candidate(2), 7);\n    std::panic::set_hook(Box::new(|_| {}));\n"
            "    let cause = std::panic::catch_unwind(|| candidate(0)).unwrap_err();\n"
            '    assert_eq!(cause.downcast_ref::<String>().unwrap(), "no 0");\n'
            "    assert!(std::panic::catch_unwind(|| candidate(1)).is_err());\n"
            "    assert_eq!(candidate(8), 1);\n"
        ),
    ),
    "a state of its own": (
        "fn target() -> usize",
        (
            "use std::sync::atomic::*;\n    static N: AtomicUsize = AtomicUsize::new(0);\n"
            "    N.fetch_add(1, Ordering::SeqCst)"
        ),
        "0",
        "assert_eq!((candidate(), candidate(), candidate()), (0, 1, 2));\n",
    ),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_go_to_the_answer_and_back(sandbox, rust, kind):
    """Values round-trip exactly in every position; a different value is a failed assertion."""
    head, right, wrong, tests = VALUES[kind]
    task = task_of(head, f"    {tests}", above=USES)
    assert task.signature is not None
    found = graded(sandbox, rust, [body(f"    {right}"), body(f"    {wrong}")], task)
    assert [one.verdict for one in found] == [Verdict.PASSED, Verdict.ASSERTION], [
        one.detail for one in found
    ]


def test_answer_may_have_types_of_its_own(sandbox, rust):
    """Argument types may differ as long as the tests compile with them."""
    task = task_of(
        "fn target(a: String, n: isize) -> isize",
        '    assert_eq!(candidate(String::from("ab"), 3), 5);\n',
    )
    passing = [
        "fn target(a: String, n: i32) -> i32 {\n    a.len() as i32 + n\n}\n",
        (
            "fn target<T: Into<String>>(a: T, n: isize) -> isize {\n"
            "    a.into().len() as isize + n\n}\n"
        ),
        (
            "impl S {\n    fn target(&self, n: u8) -> u8 { n }\n}\nstruct S;\n"
            "pub fn target(a: String, n: isize) -> isize {\n"
            "    S.target(a.len() as u8) as isize + n\n}\n"
        ),
    ]
    refused = ["fn target(a: &str, n: isize) -> isize {\n    a.len() as isize + n\n}\n"]
    found = graded(sandbox, rust, passing + refused, task)
    assert [one.verdict for one in found] == [Verdict.PASSED] * 3 + [Verdict.COMPILE_ERROR]
    assert "mismatched types" in (found[-1].detail or "")


def test_compile_bomb_does_not_compile(sandbox, rust):
    """An answer on which the compiler exceeds a limit is a compile error."""
    (one,) = graded(sandbox, rust, [DOUBLING])
    assert one.verdict is Verdict.COMPILE_ERROR
    assert "the compiler passed a limit" in (one.detail or "")


def test_text_that_would_stop_the_reader_does_not():
    """Deeply nested types, many signatures and many comments are read within five seconds."""
    began = time.monotonic()
    deep = f"fn target(a: {'Vec<' * 5000}u8{'>' * 5000}) -> u8 {{ 0 }}\n"
    assert signatures(deep, "target") == []
    assert signatures("fn target(" * 20_000, "target") == []
    comments = "/* a */ " * 2000
    text = f"{comments}\n{ANSWER}\n{comments} no item\n{comments}"
    assert "fn target" in assemble_rust(text, prompt=TASK.prompt, entry_point="target")
    assert time.monotonic() - began < 5


OTHER = {
    "a generic type": "fn target<T: Ord>(a: T) -> T",
    "a type of the task": "struct P;\nfn target(a: P) -> isize",
    "an opaque type": "fn target(a: impl Fn(i32) -> i32) -> i32",
    "a function": "fn target(f: fn(i32) -> i32) -> i32",
    "a method": "fn target(&self) -> i32",
    "a slice that nothing borrows": "fn target(a: Box<[i32]>) -> i32",
    "a changed text": "fn target(a: &mut str)",
    "a result that can be changed": "fn target(a: &mut i32) -> &mut i32",
    "an alias": "fn target(a: std::io::Result<i32>) -> i32",
    "a pattern": "fn target((a, b): (i32, i32)) -> i32",
    "a constant length": "fn target<const N: usize>(a: [i32; N]) -> i32",
    "an async function": "async fn target(a: i32) -> i32",
    "an unsafe function": "unsafe fn target(a: i32) -> i32",
    "a where clause": "fn target(a: i32) -> i32 where i32: Copy",
    "too many types": "fn target(a: Vec<i32, i32>) -> i32",
    "a large tuple": "fn target() -> (u8, u8, u8, u8, u8, u8, u8, u8, u8)",
}


@pytest.mark.parametrize("kind", OTHER)
def test_signature_of_other_values_is_not_graded_by_values(kind):
    """Tests of such a task must trust the answer, as docs/method/sandbox.md says."""
    assert task_of(OTHER[kind], "").signature is None


def test_task_of_other_values_is_trusting(sandbox, rust):
    """The task is graded as one program: the right answer passes, the wrong one fails."""
    task = task_of(
        "fn target<T: Ord + Copy>(a: &[T]) -> Option<T>",
        "    assert_eq!(target(&[1, 3, 2]), Some(3));\n",
    )
    task = RustTask(
        id=task.id,
        prompt=task.prompt,
        entry_point="target",
        tests=task.tests.replace("    let candidate = target;\n", ""),
        stop_tokens=(),
    )
    texts = [body("    a.iter().copied().max()"), body("    a.first().copied()")]
    found = graded(sandbox, rust, [*texts, body("    std::process::exit(0)")], task)
    assert [one.verdict for one in found] == [Verdict.PASSED, Verdict.ASSERTION, Verdict.EXITED]
