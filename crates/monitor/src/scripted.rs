//! Builds frames for tests and for the fuzzer.

/// Sender of a frame: the client is 10.0.0.2, port 40000, the server 10.0.0.1, port 80.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The client.
    Client,
    /// The server.
    Server,
}

/// Port of the client.
pub const CLIENT_PORT: u16 = 40_000;
/// Port of the server.
pub const SERVER_PORT: u16 = 80;

/// Returns an Ethernet frame with a TCP segment of the first client. Checksums are zero.
#[must_use]
pub fn segment(side: Side, seq: u32, ack: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
    segment_of(([10, 0, 0, 2], CLIENT_PORT), side, seq, ack, flags, payload)
}

/// Returns a frame with a TCP segment of the client with this address and port.
#[must_use]
pub fn segment_of(
    client: ([u8; 4], u16),
    side: Side,
    seq: u32,
    ack: u32,
    flags: u8,
    payload: &[u8],
) -> Vec<u8> {
    let server = ([10, 0, 0, 1], SERVER_PORT);
    let (source, destination) = match side {
        Side::Client => (client, server),
        Side::Server => (server, client),
    };
    let total_len = u16::try_from(40 + payload.len()).unwrap_or(0);
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    frame.extend(total_len.to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
    frame.extend(source.0);
    frame.extend(destination.0);
    frame.extend(source.1.to_be_bytes());
    frame.extend(destination.1.to_be_bytes());
    frame.extend(seq.to_be_bytes());
    frame.extend(ack.to_be_bytes());
    frame.extend([0x50, flags, 1, 0, 0, 0, 0, 0]);
    frame.extend(payload);
    frame
}
