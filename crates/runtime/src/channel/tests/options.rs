//! Options of connections, which are set through the region.

use super::*;
use crate::TcpOption;
use crate::channel::control::{ChannelReply, ChannelRequest, ControlPath};
use ginnel_stack::error::OptionError;

/// Records the requests.
struct RequestLog(SameThread, Arc<Mutex<Vec<String>>>);

impl ControlPath for RequestLog {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        self.1.lock().unwrap().push(format!("{request:?}"));
        self.0.call(client, request)
    }
}

#[test]
fn options_are_set_without_a_request() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let requests = Arc::new(Mutex::new(Vec::new()));
    let control = RequestLog(SameThread(fixture.server.clone()), requests.clone());
    let mut client = fixture.server.lock().unwrap().handler_mut().attach(Box::new(control)).unwrap();
    listen(&mut client, 1);
    fixture.connect_peer(b"");
    fixture.run(SECOND);
    let conn = fixture.events(&mut client).iter().find_map(|event| match event {
        ClientEvent::Accepted { conn, .. } => Some(*conn),
        _ => None,
    });
    let conn = conn.unwrap();
    requests.lock().unwrap().clear();
    // Two small segments that are joined, because the first one is held back until the option is cleared.
    client.set_option(conn, TcpOption::Cork(true)).unwrap();
    client.send(conn, b"one ").unwrap();
    client.send(conn, b"segment").unwrap();
    client.flush();
    fixture.run(Duration::from_millis(50));
    assert_eq!(fixture.peer.handler().received[0], b"", "the segment is held back");
    client.set_option(conn, TcpOption::Cork(false)).unwrap();
    client.flush();
    fixture.run(Duration::from_millis(50));
    assert_eq!(fixture.peer.handler().received[0], b"one segment");
    client.set_option(conn, TcpOption::MaxSegment(333)).unwrap();
    assert_eq!(client.set_option(conn, TcpOption::KeepCount(0)), Err(OptionError::Invalid));
    assert_eq!(*requests.lock().unwrap(), Vec::<String>::new());
    assert_eq!(client.info(conn).unwrap().snd_mss, 333 - 12, "notifications are processed before a request");
    client.abort(conn).unwrap();
    client.flush();
    fixture.run(SECOND);
    assert_eq!(client.set_option(conn, TcpOption::NoDelay(true)), Err(OptionError::Stale));
    assert_eq!(fixture.stats().options_refused, 0);
}
