
use ::std::sync::Mutex;

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
            Some(message) => ::std::panic!("{}", message),
            None => stop("refused", 3),
        },
        _ => stop("refused", 3),
    }
}

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

pub fn stop(said: &str, code: i32) -> ! {
    ::std::eprintln!("\n{} {}", WORD, said);
    ::std::process::exit(code)
}
