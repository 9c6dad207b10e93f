//! Priorities of frames on a device that carries none.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{Config, Conn, Context, Error, FrameDirection, Handler, Packet, Shard, StopFlag, UdpOptions};
use ginnel_testkit::interop::in_namespace;
use std::net::UdpSocket;
use std::sync::mpsc;

/// Receives datagrams.
struct Sink(SocketAddr);

impl Handler for Sink {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.udp_bind(self.0, UdpOptions::default()).map(|_| ()).map_err(|e| Error::application(e.to_string()))
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// The function of a program is called with the priority that a rule gave the frame.
#[test]
fn rules_and_functions_apply_to_frames_of_a_tap() {
    in_namespace("priorities::rules_and_functions_apply_to_frames_of_a_tap", || {
        let rule = "[[priority.rules]]\npriority = 6\nprotocol = \"udp\"\npayload = { value = \"02\" }\n";
        let mut device = DeviceConfig::new("gtap0", DeviceKind::Tap);
        device.kernel_addresses = vec!["10.79.0.1/24".parse().unwrap()];
        let mut config = Config::single(device, &["10.79.0.2/24".parse().unwrap()], &[]);
        config.priority = Config::from_toml("x.toml", rule).unwrap().priority;
        let to: SocketAddr = "10.79.0.2:9".parse().unwrap();
        let (seen, datagrams) = mpsc::channel();
        let builder = Shard::builder(config).handler(Sink(to)).priority_function(move |direction| {
            // A TAP carries no labels, so sent frames are not classified.
            assert_eq!(direction, FrameDirection::Receive);
            let seen = seen.clone();
            move |packet: &Packet<'_>, usual: u8| {
                if let (Some((_, 9)), Some(payload)) = (packet.ports(), packet.payload()) {
                    seen.send((payload[0], usual)).unwrap();
                }
                usual
            }
        });
        let mut shard = builder.build().unwrap();
        let stop = StopFlag::new().unwrap();
        std::thread::scope(|scope| {
            let flag = stop.clone();
            scope.spawn(move || shard.run(&flag).unwrap());
            let socket = UdpSocket::bind("10.79.0.1:0").unwrap();
            for payload in [[1], [2], [1]] {
                socket.send_to(&payload, to).unwrap();
            }
            let received: Vec<_> = (0..3)
                .map(|_| datagrams.recv_timeout(Duration::from_secs(10)))
                .collect::<Result<_, _>>()
                .unwrap();
            assert_eq!(received, [(1, 0), (2, 6), (1, 0)]);
            stop.stop();
        });
    });
}
