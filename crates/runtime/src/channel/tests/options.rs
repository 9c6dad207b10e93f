//! Options of connections, which go through the region.

use super::*;
use crate::TcpOption;
use crate::channel::control::{ChannelReply, ChannelRequest, ControlPath};
use ginnel_stack::error::OptionError;

/// Counts the questions that are asked.
struct Counting(SameThread, Arc<Mutex<Vec<String>>>);

impl ControlPath for Counting {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        self.1.lock().unwrap().push(format!("{request:?}"));
        self.0.call(client, request)
    }
}

#[test]
fn options_are_set_without_a_request() {
    let mut rig = Fixture::new(&small_config(), Peer::default());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let control = Counting(SameThread(rig.server.clone()), asked.clone());
    let mut client = rig.server.lock().unwrap().handler_mut().attach(Box::new(control)).unwrap();
    listen(&mut client, 1);
    rig.connect_peer(b"");
    rig.run(SECOND);
    let conn = rig.events(&mut client).iter().find_map(|event| match event {
        ClientEvent::Accepted { conn, .. } => Some(*conn),
        _ => None,
    });
    let conn = conn.unwrap();
    asked.lock().unwrap().clear();
    // Two small segments that would be one, and then one that is held back until it is let go.
    client.set_option(conn, TcpOption::Cork(true)).unwrap();
    client.send(conn, b"one ").unwrap();
    client.send(conn, b"segment").unwrap();
    client.flush();
    rig.run(Duration::from_millis(50));
    assert_eq!(rig.peer.handler().received[0], b"", "it is held back");
    client.set_option(conn, TcpOption::Cork(false)).unwrap();
    client.flush();
    rig.run(Duration::from_millis(50));
    assert_eq!(rig.peer.handler().received[0], b"one segment");
    client.set_option(conn, TcpOption::MaxSegment(333)).unwrap();
    assert_eq!(client.set_option(conn, TcpOption::KeepCount(0)), Err(OptionError::Invalid));
    assert_eq!(*asked.lock().unwrap(), Vec::<String>::new());
    assert_eq!(
        client.info(conn).unwrap().snd_mss,
        333 - 12,
        "what was rung for is answered before a question"
    );
    client.abort(conn).unwrap();
    client.flush();
    rig.run(SECOND);
    assert_eq!(client.set_option(conn, TcpOption::NoDelay(true)), Err(OptionError::Stale));
    assert_eq!(rig.stats().options_refused, 0);
}
