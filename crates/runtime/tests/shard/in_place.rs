//! A handler reads received bytes where the device has put them.

use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, START, config, host};
use core::ops::Range;
use core::time::Duration;
use ginnel::{Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Shard};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Device, RxBurst, RxQueue};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

/// Bytes that the client sends.
const BYTES: usize = 1 << 20;

/// Addresses of the frames that a device lends.
type FrameAddresses = Arc<Mutex<Vec<Range<usize>>>>;

/// Records where the frames of the last burst are.
struct RecordingRx {
    inner: Box<dyn RxQueue + Send>,
    lent: FrameAddresses,
}

impl RxQueue for RecordingRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        self.inner.rx_burst(now, burst);
        let addresses = burst.iter().map(|frame| {
            let Range { start, end } = frame.bytes.as_ptr_range();
            start.addr()..end.addr()
        });
        *self.lent.lock().unwrap() = addresses.collect();
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }
}

/// Counts the calls with bytes in a frame of the device, and the other ones.
struct Reader {
    lent: FrameAddresses,
    /// False to leave the last byte of each call for the next one.
    reads_all: bool,
    inside: usize,
    outside: usize,
    read: usize,
}

impl Handler for Reader {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        let Range { start, end } = data.as_ptr_range();
        let is_lent = |frame: &Range<usize>| frame.start <= start.addr() && end.addr() <= frame.end;
        let is_inside = self.lent.lock().unwrap().iter().any(is_lent);
        self.inside += usize::from(is_inside);
        self.outside += usize::from(!is_inside);
        let take = if self.reads_all || data.len() == 1 { data.len() } else { data.len() - 1 };
        self.read += take;
        take
    }
}

/// Connects and sends [`BYTES`] bytes.
#[derive(Default)]
struct Writer {
    conn: Option<Conn>,
    sent: usize,
}

impl Writer {
    fn send(&mut self, cx: &mut Context<'_>) {
        if let Some(conn) = self.conn {
            self.sent += cx.send(conn, &vec![7; BYTES - self.sent]).unwrap();
        }
    }
}

impl Handler for Writer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.conn = Some(cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default())?);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, _: Conn) {
        self.send(cx);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn writable(&mut self, cx: &mut Context<'_>, _: Conn) {
        self.send(cx);
    }
}

/// Sends to a server, whose handler reads all of each call or not. Returns how many calls had bytes in a
/// frame of the device and outside of one, and how many bytes the stack copied.
fn read(device: &MemoryConfig, reads_all: bool) -> (usize, usize, u64) {
    let (near, far) = pair(device.clone());
    let lent = FrameAddresses::default();
    let rx = RecordingRx { inner: near.rx, lent: lent.clone() };
    let near = Device { rx: Box::new(rx), tx: near.tx };
    let reader = Reader { lent, reads_all, inside: 0, outside: 0, read: 0 };
    let server = Shard::builder(config(&[SERVER_ADDRESS])).handler(reader).device("cable", near);
    let mut server = server.seed([1; 32]).now(START).build().unwrap();
    let client = host(CLIENT_ADDRESS, Writer::default(), far);
    let mut client = client.seed([2; 32]).now(START).build().unwrap();
    let mut now = START;
    for _ in 0..1_000_000 {
        if server.handler().read == BYTES {
            break;
        }
        now += Duration::from_micros(20);
        client.poll_once(now).unwrap();
        server.poll_once(now).unwrap();
    }
    assert_eq!(server.handler().read, BYTES);
    let copied = server.with(now, |_, cx| cx.tcp_stats().bytes_copied_in);
    (server.handler().inside, server.handler().outside, copied)
}

#[test]
fn bytes_are_read_in_the_device_without_a_copy() {
    // Super-frames, and segments.
    for device in [MemoryConfig::default(), MemoryConfig::default().without_offloads()] {
        let (inside, outside, copied) = read(&device, true);
        assert!(inside > 10, "{inside}");
        assert_eq!((outside, copied), (0, 0));
        // What a handler leaves is kept in memory of the stack.
        let (_, outside, copied) = read(&device, false);
        assert!(outside > 10 && copied > 10, "{outside} {copied}");
    }
}
