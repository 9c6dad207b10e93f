//! Messages to the service manager, as sd_notify(3) sends them: a datagram to the socket in `NOTIFY_SOCKET`.

use std::ffi::OsString;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The stack serves programs.
pub const READY: &str = "READY=1";
/// The stack begins to end.
pub const STOPPING: &str = "STOPPING=1";

/// Sends `message` if a service manager waits for one. A failure is ignored: nobody else waits.
pub fn notify(message: &str) {
    if let Some(name) = std::env::var_os("NOTIFY_SOCKET") {
        let _ = send(&name, message);
    }
}

fn send(name: &OsString, message: &str) -> std::io::Result<()> {
    // An abstract address begins with `@` in the variable.
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_reach_paths_and_abstract_names() {
        let path = std::env::temp_dir().join(format!("ginnel-notify-{}", std::process::id()));
        let socket = UnixDatagram::bind(&path).unwrap();
        send(&path.clone().into_os_string(), READY).unwrap();
        let mut buffer = [0; 16];
        let received = socket.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..received], b"READY=1");
        std::fs::remove_file(&path).unwrap();
        let name = format!("ginnel-notify-{}", std::process::id());
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        send(&format!("@{name}").into(), STOPPING).unwrap();
        let received = socket.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..received], b"STOPPING=1");
    }
}
