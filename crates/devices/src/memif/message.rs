//! Messages of the control channel: 128 bytes each, in host byte order, because both ends run on one machine.

use super::extension::Features;

/// Bytes of every message.
pub(super) const MESSAGE_BYTES: usize = 128;
/// Version 2.0 of the protocol, the only existing version.
pub(super) const VERSION: u16 = 0x0200;
/// Interface mode of frames with an Ethernet header.
pub(super) const MODE_ETHERNET: u8 = 0;
/// Bytes of a secret.
pub(super) const SECRET_BYTES: usize = 24;
/// Bytes of a name, including its terminating zero.
const NAME_BYTES: usize = 32;
/// Bytes of the reason of a DISCONNECT.
const REASON_BYTES: usize = 96;
/// Flag of a ring from client to server.
const RING_TO_SERVER: u16 = 1;
/// Offset of the extension: after all fields of any message of the protocol, where other implementations send
/// zeros.
const EXTENSION_AT: usize = 112;

/// HELLO, the server's first message: its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) name: String,
    pub(super) version_min: u16,
    pub(super) version_max: u16,
    /// Largest index of a region.
    pub(super) region_max: u16,
    /// Largest index of a ring from server to client.
    pub(super) ring_to_client_max: u16,
    /// Largest index of a ring from client to server.
    pub(super) ring_to_server_max: u16,
    /// Largest size of a ring, as a power of two.
    pub(super) ring_log2_max: u8,
    pub(super) features: Features,
}

/// INIT: the interface that the client wants to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Init {
    pub(super) version: u16,
    pub(super) id: u32,
    pub(super) mode: u8,
    pub(super) secret: [u8; SECRET_BYTES],
    pub(super) name: String,
    /// Features that the client selected from those of the server.
    pub(super) features: Features,
}

/// ADD_RING: location of a ring. Its eventfd accompanies the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddRing {
    pub(super) to_server: bool,
    pub(super) index: u16,
    pub(super) region: u16,
    pub(super) offset: u32,
    pub(super) log2: u8,
    /// Bytes of the header in front of each frame that the two ends agreed on.
    pub(super) private_header_bytes: u16,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControlMessage {
    Ack,
    Hello(Hello),
    Init(Init),
    /// A memory region. Its memfd accompanies the message.
    AddRegion {
        index: u16,
        size: u64,
    },
    AddRing(AddRing),
    Connect {
        name: String,
    },
    Connected {
        name: String,
    },
    Disconnect {
        code: u32,
        reason: String,
    },
}

/// Reason why bytes are no message: wrong length or unknown type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MessageError {
    Length(usize),
    Type(u16),
}

impl ControlMessage {
    pub(super) fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut out = MessageWriter { bytes: [0; MESSAGE_BYTES], at: 0 };
        match self {
            Self::Ack => out.put(1u16.to_ne_bytes()),
            Self::Hello(hello) => {
                out.put(2u16.to_ne_bytes());
                out.text(&hello.name, NAME_BYTES);
                for word in [
                    hello.version_min,
                    hello.version_max,
                    hello.region_max,
                    hello.ring_to_client_max,
                    hello.ring_to_server_max,
                ] {
                    out.put(word.to_ne_bytes());
                }
                out.put([hello.ring_log2_max]);
                out.extension(hello.features);
            }
            Self::Init(init) => {
                out.put(3u16.to_ne_bytes());
                out.put(init.version.to_ne_bytes());
                out.put(init.id.to_ne_bytes());
                out.put([init.mode]);
                out.put(init.secret);
                out.text(&init.name, NAME_BYTES);
                out.extension(init.features);
            }
            Self::AddRegion { index, size } => {
                out.put(4u16.to_ne_bytes());
                out.put(index.to_ne_bytes());
                out.put(size.to_ne_bytes());
            }
            Self::AddRing(ring) => {
                out.put(5u16.to_ne_bytes());
                out.put(u16::from(ring.to_server).to_ne_bytes());
                out.put(ring.index.to_ne_bytes());
                out.put(ring.region.to_ne_bytes());
                out.put(ring.offset.to_ne_bytes());
                out.put([ring.log2]);
                out.put(ring.private_header_bytes.to_ne_bytes());
            }
            Self::Connect { name } => {
                out.put(6u16.to_ne_bytes());
                out.text(name, NAME_BYTES);
            }
            Self::Connected { name } => {
                out.put(7u16.to_ne_bytes());
                out.text(name, NAME_BYTES);
            }
            Self::Disconnect { code, reason } => {
                out.put(8u16.to_ne_bytes());
                out.put(code.to_ne_bytes());
                out.text(reason, REASON_BYTES);
            }
        }
        out.bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().map_err(|_| MessageError::Length(bytes.len()))?;
        let mut input = MessageReader { bytes, at: 0 };
        Ok(match input.u16() {
            1 => Self::Ack,
            2 => Self::Hello(Hello {
                name: input.text(NAME_BYTES),
                version_min: input.u16(),
                version_max: input.u16(),
                region_max: input.u16(),
                ring_to_client_max: input.u16(),
                ring_to_server_max: input.u16(),
                ring_log2_max: input.take::<1>()[0],
                features: input.extension(),
            }),
            3 => Self::Init(Init {
                version: input.u16(),
                id: input.u32(),
                mode: input.take::<1>()[0],
                secret: input.take(),
                name: input.text(NAME_BYTES),
                features: input.extension(),
            }),
            4 => Self::AddRegion { index: input.u16(), size: u64::from_ne_bytes(input.take()) },
            5 => Self::AddRing(AddRing {
                to_server: input.u16() & RING_TO_SERVER != 0,
                index: input.u16(),
                region: input.u16(),
                offset: input.u32(),
                log2: input.take::<1>()[0],
                private_header_bytes: input.u16(),
            }),
            6 => Self::Connect { name: input.text(NAME_BYTES) },
            7 => Self::Connected { name: input.text(NAME_BYTES) },
            8 => Self::Disconnect { code: input.u32(), reason: input.text(REASON_BYTES) },
            other => return Err(MessageError::Type(other)),
        })
    }

    /// Returns the name of the message type, for logs and disconnect reasons.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Ack => "ack",
            Self::Hello(_) => "hello",
            Self::Init(_) => "init",
            Self::AddRegion { .. } => "add region",
            Self::AddRing(_) => "add ring",
            Self::Connect { .. } => "connect",
            Self::Connected { .. } => "connected",
            Self::Disconnect { .. } => "disconnect",
        }
    }
}

struct MessageWriter {
    bytes: [u8; MESSAGE_BYTES],
    at: usize,
}

impl MessageWriter {
    fn put<const N: usize>(&mut self, field: [u8; N]) {
        self.bytes[self.at..self.at + N].copy_from_slice(&field);
        self.at += N;
    }

    /// Writes a text field of `len` bytes that ends with at least one zero.
    fn text(&mut self, text: &str, len: usize) {
        let mut end = text.len().min(len - 1);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.bytes[self.at..self.at + end].copy_from_slice(&text.as_bytes()[..end]);
        self.at += len;
    }

    fn extension(&mut self, features: Features) {
        self.at = EXTENSION_AT;
        self.put(features.encode());
    }
}

struct MessageReader<'a> {
    bytes: &'a [u8; MESSAGE_BYTES],
    at: usize,
}

impl MessageReader<'_> {
    /// Reads a field. All fields of each message fit, as the test of the layout shows.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let field = std::array::from_fn(|i| self.bytes[self.at + i]);
        self.at += N;
        field
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    /// Reads a text field. Removes control characters, which could manipulate the terminal of a reader of the
    /// log.
    fn text(&mut self, len: usize) -> String {
        let field = &self.bytes[self.at..self.at + len];
        self.at += len;
        let end = field.iter().position(|&byte| byte == 0).unwrap_or(len);
        String::from_utf8_lossy(&field[..end]).chars().filter(|c| !c.is_control()).collect()
    }

    fn extension(&mut self) -> Features {
        self.at = EXTENSION_AT;
        Features::decode(self.take())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn all() -> Vec<ControlMessage> {
        let features = Features::ALL;
        vec![
            ControlMessage::Ack,
            ControlMessage::Hello(Hello {
                name: "server".into(),
                version_min: 0x0201,
                version_max: 0x0403,
                region_max: 0x0605,
                ring_to_client_max: 0x0807,
                ring_to_server_max: 0x0a09,
                ring_log2_max: 0x0b,
                features,
            }),
            ControlMessage::Init(Init {
                version: VERSION,
                id: 0x0d0c_0b0a,
                mode: MODE_ETHERNET,
                secret: *b"012345678901234567890123",
                name: "client".into(),
                features,
            }),
            ControlMessage::AddRegion { index: 3, size: 0x1_0203_0405 },
            ControlMessage::AddRing(AddRing {
                to_server: true,
                index: 0x0201,
                region: 0x0403,
                offset: 0x0807_0605,
                log2: 9,
                private_header_bytes: 0x0b0a,
            }),
            ControlMessage::Connect { name: "memif0".into() },
            ControlMessage::Connected { name: "memif1".into() },
            ControlMessage::Disconnect { code: 0x0403_0201, reason: "because".into() },
        ]
    }

    #[test]
    fn encoding_round_trips() {
        for (message, kind) in all().into_iter().zip(1u16..) {
            let bytes = message.encode();
            assert_eq!(bytes[..2], kind.to_ne_bytes());
            assert_eq!(ControlMessage::decode(&bytes), Ok(message));
        }
    }

    /// The offsets are those of the protocol's packed structs.
    #[test]
    fn fields_have_the_offsets_of_the_protocol() {
        let [_, hello, init, region, ring, connect, _, disconnect] =
            all().iter().map(ControlMessage::encode).collect::<Vec<_>>().try_into().expect("eight messages");
        assert_eq!(hello[2..9], *b"server\0");
        assert_eq!(hello[34..45], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(init[2..9], [0, 2, 0x0a, 0x0b, 0x0c, 0x0d, 0]);
        assert_eq!(init[9..12], *b"012");
        assert_eq!(init[32..40], *b"3client\0");
        assert_eq!(region[2..12], [3, 0, 5, 4, 3, 2, 1, 0, 0, 0]);
        assert_eq!(ring[2..15], [1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(connect[2..9], *b"memif0\0");
        assert_eq!(disconnect[2..14], *b"\x01\x02\x03\x04because\0");
    }

    #[test]
    fn malformed_messages_are_refused() {
        let mut bytes = ControlMessage::Ack.encode();
        assert_eq!(ControlMessage::decode(&bytes[..127]), Err(MessageError::Length(127)));
        assert_eq!(ControlMessage::decode(&[]), Err(MessageError::Length(0)));
        for kind in [0, 9, 0xffff] {
            bytes[..2].copy_from_slice(&u16::to_ne_bytes(kind));
            assert_eq!(ControlMessage::decode(&bytes), Err(MessageError::Type(kind)));
        }
    }

    #[test]
    fn texts_are_truncated_and_sanitised() {
        let long = "ö".repeat(40);
        let Ok(ControlMessage::Connect { name }) =
            ControlMessage::decode(&ControlMessage::Connect { name: long }.encode())
        else {
            panic!("a connect message")
        };
        assert_eq!(name, "ö".repeat(15));
        let mut bytes = ControlMessage::Connect { name: "x".into() }.encode();
        bytes[2..34].fill(0x1b);
        bytes[5] = b'y';
        bytes[6] = 0xff;
        assert_eq!(ControlMessage::decode(&bytes), Ok(ControlMessage::Connect { name: "y\u{fffd}".into() }));
    }
}
