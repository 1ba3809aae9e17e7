
/// Call the answer for each request, until there is none.
pub fn serve(call: impl Fn(&mut Given, &mut Vec<u8>) -> Option<()>) {
    let Some(mut stream) = channel() else { return };
    while let Some(mut given) = receive(&mut stream, usize::MAX) {
        let mut reply = Vec::from([0]);
        let called = ::std::panic::AssertUnwindSafe(|| call(&mut given, &mut reply));
        if let Err(cause) = ::std::panic::catch_unwind(called) {
            reply = Vec::from([1]);
            let fixed = cause.downcast_ref::<&str>().map(|text| text.to_string());
            let text = fixed.or_else(|| cause.downcast_ref::<String>().cloned());
            text.unwrap_or_default().encode(&mut reply);
        }
        if send(&mut stream, &reply).is_none() {
            break;
        }
    }
    ::std::process::exit(0);
}
