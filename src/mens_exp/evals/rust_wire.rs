// Values as bytes, and both ends of the socket between a Rust answer and its tests. A separate crate,
// so that no macro, name or lint level of an answer reaches it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, LinkedList, VecDeque};
use std::hash::Hash;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

/// A value of a type that both sides know.
pub trait Wire: Sized {
    fn encode(&self, out: &mut Vec<u8>);
    fn decode(given: &mut Given) -> Option<Self>;
}

/// What was read, up to some place.
pub struct Given {
    bytes: Vec<u8>,
    at: usize,
}

impl Given {
    fn part(&mut self, size: usize) -> Option<&[u8]> {
        let end = self.at.checked_add(size)?;
        let part = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(part)
    }

    // Every value has a byte at least, so that no length makes a reader wait or allocate.
    fn length(&mut self) -> Option<usize> {
        let length = usize::decode(self)?;
        (length <= self.bytes.len() - self.at).then_some(length)
    }
}

macro_rules! wire_numbers {
    ($($kind:ty)*) => {$(
        impl Wire for $kind {
            fn encode(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn decode(given: &mut Given) -> Option<Self> {
                let part = given.part(std::mem::size_of::<$kind>())?;
                Some(<$kind>::from_le_bytes(part.try_into().ok()?))
            }
        }
    )*};
}
wire_numbers!(i8 i16 i32 i64 i128 isize u8 u16 u32 u64 u128 usize f32 f64);

impl Wire for bool {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }
    fn decode(given: &mut Given) -> Option<Self> {
        match u8::decode(given)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl Wire for () {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(0);
    }
    fn decode(given: &mut Given) -> Option<Self> {
        u8::decode(given).map(|_| ())
    }
}

impl Wire for char {
    fn encode(&self, out: &mut Vec<u8>) {
        (*self as u32).encode(out);
    }
    fn decode(given: &mut Given) -> Option<Self> {
        char::from_u32(u32::decode(given)?)
    }
}

impl Wire for String {
    fn encode(&self, out: &mut Vec<u8>) {
        self.as_str().encode(out);
    }
    fn decode(given: &mut Given) -> Option<Self> {
        let length = given.length()?;
        String::from_utf8(given.part(length)?.to_vec()).ok()
    }
}

// A reference is made to what is never freed.
impl Wire for &str {
    fn encode(&self, out: &mut Vec<u8>) {
        self.len().encode(out);
        out.extend_from_slice(self.as_bytes());
    }
    fn decode(given: &mut Given) -> Option<Self> {
        Some(String::decode(given)?.leak())
    }
}

impl<'a, T: Wire + 'a> Wire for &'a [T] {
    fn encode(&self, out: &mut Vec<u8>) {
        self.len().encode(out);
        self.iter().for_each(|one| one.encode(out));
    }
    fn decode(given: &mut Given) -> Option<Self> {
        Some(Vec::decode(given)?.leak())
    }
}

impl<'a, T: Wire + 'a> Wire for &'a T {
    fn encode(&self, out: &mut Vec<u8>) {
        (**self).encode(out);
    }
    fn decode(given: &mut Given) -> Option<Self> {
        Some(Box::leak(Box::decode(given)?))
    }
}

impl<T: Wire> Wire for Box<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        (**self).encode(out);
    }
    fn decode(given: &mut Given) -> Option<Self> {
        T::decode(given).map(Box::new)
    }
}

impl<T: Wire> Wire for Option<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        self.is_some().encode(out);
        self.iter().for_each(|one| one.encode(out));
    }
    fn decode(given: &mut Given) -> Option<Self> {
        if bool::decode(given)? { T::decode(given).map(Some) } else { Some(None) }
    }
}

impl<T: Wire, E: Wire> Wire for Result<T, E> {
    fn encode(&self, out: &mut Vec<u8>) {
        self.is_ok().encode(out);
        match self {
            Ok(value) => value.encode(out),
            Err(error) => error.encode(out),
        }
    }
    fn decode(given: &mut Given) -> Option<Self> {
        if bool::decode(given)? { T::decode(given).map(Ok) } else { E::decode(given).map(Err) }
    }
}

impl<T: Wire, const N: usize> Wire for [T; N] {
    fn encode(&self, out: &mut Vec<u8>) {
        self.as_slice().encode(out);
    }
    fn decode(given: &mut Given) -> Option<Self> {
        Vec::decode(given)?.try_into().ok()
    }
}

macro_rules! wire_sequences {
    ($($kind:ident [$($bound:path),*])*) => {$(
        impl<T: Wire $(+ $bound)*> Wire for $kind<T> {
            fn encode(&self, out: &mut Vec<u8>) {
                self.len().encode(out);
                self.iter().for_each(|one| one.encode(out));
            }
            fn decode(given: &mut Given) -> Option<Self> {
                let length = given.length()?;
                (0..length).map(|_| T::decode(given)).collect()
            }
        }
    )*};
}
wire_sequences!(
    Vec [] VecDeque [] LinkedList [] BTreeSet [Ord] HashSet [Eq, Hash]
);

macro_rules! wire_maps {
    ($($kind:ident [$($bound:path),*])*) => {$(
        impl<K: Wire $(+ $bound)*, V: Wire> Wire for $kind<K, V> {
            fn encode(&self, out: &mut Vec<u8>) {
                self.len().encode(out);
                self.iter().for_each(|(key, value)| {
                    key.encode(out);
                    value.encode(out);
                });
            }
            fn decode(given: &mut Given) -> Option<Self> {
                let length = given.length()?;
                (0..length).map(|_| Some((K::decode(given)?, V::decode(given)?))).collect()
            }
        }
    )*};
}
wire_maps!(BTreeMap [Ord] HashMap [Eq, Hash]);

macro_rules! wire_tuples {
    ($(($($kind:ident $place:tt),+))*) => {$(
        impl<$($kind: Wire),+> Wire for ($($kind,)+) {
            fn encode(&self, out: &mut Vec<u8>) {
                $(self.$place.encode(out);)+
            }
            fn decode(given: &mut Given) -> Option<Self> {
                Some(($($kind::decode(given)?,)+))
            }
        }
    )*};
}
wire_tuples!(
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
);

extern "C" {
    fn dup2(from: i32, to: i32) -> i32;
}

/// Take the socket away from the input, which has ended for everybody else.
fn channel() -> Option<UnixStream> {
    let input = std::io::stdin();
    let socket = input.as_fd().try_clone_to_owned().ok()?;
    let nothing = std::fs::File::open("/dev/null").ok()?;
    // SAFETY: both numbers are of open files.
    (unsafe { dup2(nothing.as_raw_fd(), input.as_raw_fd()) } == input.as_raw_fd())
        .then(|| UnixStream::from(socket))
}

fn send(to: &mut UnixStream, bytes: &[u8]) -> Option<()> {
    let size = u32::try_from(bytes.len()).ok()?;
    to.write_all(&size.to_le_bytes()).ok()?;
    to.write_all(bytes).ok()
}

fn receive(from: &mut UnixStream, most: usize) -> Option<Given> {
    let mut size = [0; 4];
    from.read_exact(&mut size).ok()?;
    let size = usize::try_from(u32::from_le_bytes(size)).ok()?;
    let mut bytes = Vec::new();
    let read = from.take(size.min(most) as u64).read_to_end(&mut bytes).ok()?;
    (read == size).then_some(Given { bytes, at: 0 })
}

/// Call the answer for each request, until there is none.
pub fn serve(call: impl Fn(&mut Given, &mut Vec<u8>) -> Option<()>) {
    let Some(mut stream) = channel() else { return };
    while let Some(mut given) = receive(&mut stream, usize::MAX) {
        let mut reply = Vec::from([0]);
        let called = std::panic::AssertUnwindSafe(|| call(&mut given, &mut reply));
        if let Err(cause) = std::panic::catch_unwind(called) {
            reply = Vec::from([1]);
            let fixed = cause.downcast_ref::<&str>().map(|text| text.to_string());
            let text = fixed.or_else(|| cause.downcast_ref::<String>().cloned());
            text.unwrap_or_default().encode(&mut reply);
        }
        if send(&mut stream, &reply).is_none() {
            break;
        }
    }
    std::process::exit(0);
}

const MOST: usize = 64 << 20;
static CHANNEL: Mutex<Option<UnixStream>> = Mutex::new(None);

/// Have the answer called; its panic is a panic here.
pub fn ask(request: Vec<u8>) -> Given {
    let reply = {
        let mut held = CHANNEL.lock().unwrap_or_else(|error| error.into_inner());
        let stream = held.get_or_insert_with(|| channel().expect("an input that is a socket"));
        send(stream, &request).and_then(|()| receive(stream, MOST))
    };
    let Some(mut given) = reply else { stop("ended", 4) };
    match u8::decode(&mut given) {
        Some(0) => given,
        Some(1) => match String::decode(&mut given) {
            Some(message) => panic!("{message}"),
            None => stop("refused", 3),
        },
        _ => stop("refused", 3),
    }
}

/// Return the value that comes next in a reply.
pub fn taken<T: Wire>(given: &mut Given) -> T {
    T::decode(given).unwrap_or_else(|| stop("refused", 3))
}

/// Refuse a reply that goes on.
pub fn finished(given: Given) {
    if given.at != given.bytes.len() {
        stop("refused", 3);
    }
}

/// Do to an argument what the answer did to its copy.
pub fn fill<T>(place: &mut [T], values: Vec<T>) {
    if place.len() != values.len() {
        stop("refused", 3);
    }
    place.iter_mut().zip(values).for_each(|(one, value)| *one = value);
}

/// Say the verdict with the word that this process was started with.
pub fn stop(said: &str, code: i32) -> ! {
    let word = std::env::args().nth(1).unwrap_or_default();
    eprintln!("\n{word} {said}");
    std::process::exit(code)
}
