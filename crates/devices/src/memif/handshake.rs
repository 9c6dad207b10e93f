//! The handshake of client and server.
//!
//! ```text
//!   server                         client
//!   HELLO (limits, features)   →
//!                              ←   INIT (id, secret, selected features)
//!   ACK                        →
//!                              ←   ADD_REGION, with its memfd       once for each region
//!   ACK                        →
//!                              ←   ADD_RING, with its eventfd       once for each ring
//!   ACK                        →
//!                              ←   CONNECT
//!   CONNECTED                  →
//! ```
//!
//! Either may send DISCONNECT at any time. Any other message, or a message out of order, ends the connection.

use super::config::MemifConfig;
use super::extension::Features;
use super::message::{AddRing, ControlMessage, Hello, Init, MODE_ETHERNET, SECRET_BYTES, VERSION};
use super::ring::{LOG2_MAX, MemifRing, ring_bytes};
use super::ring_slot::InterruptFd;
use super::rx::RingBuffers;
use crate::shared_region::Region;
use rustix::fd::OwnedFd;
use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum number of regions of a client. One is sufficient; DPDK offers one for each list of memory
/// segments.
const REGIONS_MAX: u16 = 16;
/// Maximum bytes of a region: offsets have 32 bits.
const REGION_BYTES_MAX: u64 = 1 << 32;

/// A ring with its interrupt and its buffers.
#[derive(Debug)]
pub(super) struct NegotiatedRing {
    pub(super) ring: MemifRing,
    pub(super) interrupt: InterruptFd,
    pub(super) buffers: RingBuffers,
}

/// The regions and rings of a connection.
#[derive(Debug)]
pub(super) struct NegotiatedLink {
    pub(super) regions: Arc<[Arc<Region>]>,
    pub(super) to_server: Vec<NegotiatedRing>,
    pub(super) to_client: Vec<NegotiatedRing>,
    pub(super) features: Features,
    /// Name that the peer gives itself.
    pub(super) peer: String,
}

/// Action that follows a message.
#[derive(Debug)]
pub(super) enum HandshakeStep {
    Send(ControlMessage, Option<OwnedFd>),
    /// The server has all rings: establish the connection, then send the message.
    Connect(Box<NegotiatedLink>, ControlMessage),
    /// The client is connected.
    Connected(Box<NegotiatedLink>),
    /// The peer has sent DISCONNECT, with this reason.
    Disconnected(String),
}

/// Reason for which the peer is disconnected.
pub(super) type RejectReason = String;

fn name_of(config: &MemifConfig) -> String {
    format!("ginnel {} memif{}", env!("CARGO_PKG_VERSION"), config.id)
}

fn features_of(config: &MemifConfig) -> Features {
    if config.offload { Features::ALL } else { Features::default() }
}

/// The handshake of a server.
#[derive(Debug)]
pub(super) struct ServerHandshake {
    config: Arc<MemifConfig>,
    /// Name and features of the client, from INIT.
    client: Option<(String, Features)>,
    regions: Vec<Arc<Region>>,
    to_server: Vec<Option<NegotiatedRing>>,
    to_client: Vec<Option<NegotiatedRing>>,
    /// True if CONNECTED was sent: only DISCONNECT is expected.
    is_done: bool,
}

impl ServerHandshake {
    /// Creates a handshake. Returns its first message, too.
    pub(super) fn new(config: &Arc<MemifConfig>) -> (Self, ControlMessage) {
        let hello = Hello {
            name: name_of(config),
            version_min: VERSION,
            version_max: VERSION,
            region_max: REGIONS_MAX - 1,
            ring_to_client_max: config.queues - 1,
            ring_to_server_max: config.queues - 1,
            ring_log2_max: LOG2_MAX,
            features: features_of(config),
        };
        let rings = || (0..config.queues).map(|_| None).collect();
        let handshake = Self {
            config: config.clone(),
            client: None,
            regions: Vec::new(),
            to_server: rings(),
            to_client: rings(),
            is_done: false,
        };
        (handshake, ControlMessage::Hello(hello))
    }

    /// Returns whether a client has sent INIT, so that no other client can be connected.
    pub(super) fn has_init(&self) -> bool {
        self.client.is_some()
    }

    fn is_setting_up(&self) -> bool {
        self.client.is_some() && !self.is_done
    }

    /// Processes a message of the client. `busy`: another client is connected or in the handshake.
    pub(super) fn on_message(
        &mut self,
        message: ControlMessage,
        descriptor: Option<OwnedFd>,
        busy: bool,
    ) -> Result<HandshakeStep, RejectReason> {
        match message {
            ControlMessage::Disconnect { reason, .. } => return Ok(HandshakeStep::Disconnected(reason)),
            ControlMessage::Init(init) if self.client.is_none() => {
                self.check_init(&init, busy)?;
                let features = features_of(&self.config).intersect(init.features);
                if features.frame_headers != init.features.frame_headers {
                    return Err("features that were not offered".into());
                }
                self.client = Some((init.name, features));
            }
            ControlMessage::AddRegion { index, size } if self.is_setting_up() => {
                let descriptor = descriptor.ok_or("region without descriptor")?;
                if index >= REGIONS_MAX || usize::from(index) != self.regions.len() {
                    return Err("region index out of order".into());
                }
                let size = usize::try_from(size).ok().filter(|_| size <= REGION_BYTES_MAX);
                let size = size.ok_or("region too large")?;
                let region = Region::from_peer(&descriptor, size).map_err(|refused| refused.to_string())?;
                self.regions.push(Arc::new(region));
            }
            ControlMessage::AddRing(ring) if self.is_setting_up() => {
                self.add_ring(ring, descriptor.ok_or("ring without descriptor")?)?;
            }
            ControlMessage::Connect { .. } if self.is_setting_up() => {
                let link = self.connect()?;
                return Ok(HandshakeStep::Connect(
                    Box::new(link),
                    ControlMessage::Connected { name: name_of(&self.config) },
                ));
            }
            other => return Err(format!("unexpected message: {}", other.kind())),
        }
        Ok(HandshakeStep::Send(ControlMessage::Ack, None))
    }

    fn check_init(&self, init: &Init, busy: bool) -> Result<(), RejectReason> {
        let reason = if init.version != VERSION {
            "version not supported"
        } else if init.mode != MODE_ETHERNET {
            "only Ethernet mode is supported"
        } else if init.id != self.config.id {
            "id not found"
        } else if self.config.secret.is_some() && init.secret != secret_bytes(&self.config) {
            "wrong secret"
        } else if busy {
            "already connected"
        } else {
            return Ok(());
        };
        Err(reason.into())
    }

    fn add_ring(&mut self, offer: AddRing, descriptor: OwnedFd) -> Result<(), RejectReason> {
        let features = self.client.as_ref().map(|(_, features)| *features).unwrap_or_default();
        if features.frame_headers && usize::from(offer.private_header_bytes) != features.header_bytes() {
            return Err("wrong size of the frame header".into());
        }
        let region = self.regions.get(usize::from(offer.region)).ok_or("ring in an unknown region")?;
        let ring = MemifRing::new(region, offer.offset as usize, offer.log2)
            .ok_or("ring is outside its region, not aligned or of a size that is not allowed")?;
        let interrupt = InterruptFd::from_peer(descriptor).ok_or("ring without eventfd")?;
        let rings = if offer.to_server { &mut self.to_server } else { &mut self.to_client };
        let slot = rings.get_mut(usize::from(offer.index)).ok_or("ring index too large")?;
        if slot.is_some() {
            return Err("ring added twice".into());
        }
        *slot = Some(NegotiatedRing { ring, interrupt, buffers: RingBuffers::Peer });
        Ok(())
    }

    fn connect(&mut self) -> Result<NegotiatedLink, RejectReason> {
        let (peer, features) = self.client.clone().unwrap_or_default();
        let rings = |rings: &mut Vec<Option<NegotiatedRing>>| {
            let count = rings.iter().flatten().count();
            let rings: Vec<_> = std::mem::take(rings).into_iter().map_while(|ring| ring).collect();
            if rings.is_empty() || rings.len() != count {
                return Err("ring missing");
            }
            if rings.iter().any(|offered| !offered.ring.has_cookie()) {
                Err("ring without cookie")
            } else {
                Ok(rings)
            }
        };
        let (to_server, to_client) = (rings(&mut self.to_server)?, rings(&mut self.to_client)?);
        let regions = std::mem::take(&mut self.regions).into();
        self.is_done = true;
        Ok(NegotiatedLink { regions, to_server, to_client, features, peer })
    }
}

fn secret_bytes(config: &MemifConfig) -> [u8; SECRET_BYTES] {
    let mut bytes = [0; SECRET_BYTES];
    let secret = config.secret.as_deref().unwrap_or_default().as_bytes();
    let len = secret.len().min(SECRET_BYTES);
    bytes[..len].copy_from_slice(&secret[..len]);
    bytes
}

/// The handshake of a client.
#[derive(Debug)]
pub(super) struct ClientHandshake {
    config: Arc<MemifConfig>,
    /// Messages to send, each after an ACK.
    outgoing: VecDeque<(ControlMessage, Option<OwnedFd>)>,
    /// Set from HELLO until the connection is established.
    link: Option<Box<NegotiatedLink>>,
    /// True if HELLO was received. A second one is an error.
    has_hello: bool,
}

impl ClientHandshake {
    pub(super) fn new(config: &Arc<MemifConfig>) -> Self {
        Self { config: config.clone(), outgoing: VecDeque::new(), link: None, has_hello: false }
    }

    pub(super) fn on_message(&mut self, message: ControlMessage) -> Result<HandshakeStep, RejectReason> {
        match message {
            ControlMessage::Disconnect { reason, .. } => Ok(HandshakeStep::Disconnected(reason)),
            ControlMessage::Hello(hello) if !self.has_hello => {
                self.has_hello = true;
                let failed = |error: std::io::Error| format!("no memory for rings and buffers: {error}");
                self.prepare_link(&hello)?.map_err(failed)?;
                self.next_message()
            }
            ControlMessage::Ack if !self.outgoing.is_empty() => self.next_message(),
            ControlMessage::Connected { .. } if self.outgoing.is_empty() => {
                let link = self.link.take().ok_or("unexpected message: connected")?;
                Ok(HandshakeStep::Connected(link))
            }
            other => Err(format!("unexpected message: {}", other.kind())),
        }
    }

    fn next_message(&mut self) -> Result<HandshakeStep, RejectReason> {
        let (message, descriptor) = self.outgoing.pop_front().ok_or("unexpected message: ack")?;
        Ok(HandshakeStep::Send(message, descriptor))
    }

    /// Allocates the memory, and prepares all messages about it.
    fn prepare_link(&mut self, hello: &Hello) -> Result<std::io::Result<()>, RejectReason> {
        if !(hello.version_min..=hello.version_max).contains(&VERSION) {
            return Err("version not supported".into());
        }
        let config = &self.config;
        let log2 = config.ring_log2().min(hello.ring_log2_max);
        let features = features_of(config).intersect(hello.features);
        let to_server = config.queues.min(hello.ring_to_server_max.saturating_add(1));
        let to_client = config.queues.min(hello.ring_to_client_max.saturating_add(1));
        Ok(allocate_link(config, log2, to_server, to_client, features).map(|(mut link, steps)| {
            link.peer.clone_from(&hello.name);
            self.link = Some(Box::new(link));
            self.outgoing = steps;
        }))
    }
}

type OutgoingMessages = VecDeque<(ControlMessage, Option<OwnedFd>)>;

/// Allocates one region that contains all rings and, after them, their buffers. The configuration bounds its
/// size to less than 4 GiB.
fn allocate_link(
    config: &MemifConfig,
    log2: u8,
    to_server: u16,
    to_client: u16,
    features: Features,
) -> std::io::Result<(NegotiatedLink, OutgoingMessages)> {
    let rings = usize::from(to_server) + usize::from(to_client);
    let buffers_at = (rings * ring_bytes(log2)).next_multiple_of(4096);
    let buffer_bytes = config.buffer_bytes;
    let ring_buffers = (buffer_bytes as usize) << log2;
    let size = buffers_at + rings * ring_buffers;
    let (region, memfd) = Region::create("ginnel-memif", size)?;
    let region = Arc::new(region);
    // Frames have headers only if the largest frame with its header fits into the buffers of a ring.
    let features =
        if super::FRAME_WITH_HEADER_BYTES_MAX <= ring_buffers { features } else { Features::default() };

    let mut steps = OutgoingMessages::new();
    let init = Init {
        version: VERSION,
        id: config.id,
        mode: MODE_ETHERNET,
        secret: secret_bytes(config),
        name: name_of(config),
        features,
    };
    steps.push_back((ControlMessage::Init(init), None));
    steps.push_back((ControlMessage::AddRegion { index: 0, size: size as u64 }, Some(memfd)));
    let mut offer = |number: usize, to_server: bool, index: u16| -> std::io::Result<NegotiatedRing> {
        let offset = number * ring_bytes(log2);
        let ring = MemifRing::new(&region, offset, log2).ok_or(std::io::ErrorKind::InvalidInput)?;
        ring.initialise();
        let interrupt = InterruptFd::new()?;
        let message = AddRing {
            to_server,
            index,
            region: 0,
            offset: offset as u32,
            log2,
            private_header_bytes: features.header_bytes() as u16,
        };
        steps.push_back((ControlMessage::AddRing(message), Some(interrupt.fd().try_clone()?)));
        let at = (buffers_at + number * ring_buffers) as u32;
        let buffers = RingBuffers::Local { at, bytes: buffer_bytes };
        // Writes the buffers to the descriptors, so that a peer that reads the descriptors before the ring is
        // used finds them.
        buffers.write_all_descriptors(&ring);
        Ok(NegotiatedRing { ring, interrupt, buffers })
    };
    let mut numbers = 0..rings;
    let mut offer_all = |to_server: bool, count: u16| -> std::io::Result<Vec<NegotiatedRing>> {
        (0..count).zip(&mut numbers).map(|(index, number)| offer(number, to_server, index)).collect()
    };
    let (to_server, to_client) = (offer_all(true, to_server)?, offer_all(false, to_client)?);
    steps.push_back((ControlMessage::Connect { name: name_of(config) }, None));
    Ok((
        NegotiatedLink {
            regions: Arc::new([region.clone()]),
            to_server,
            to_client,
            features,
            peer: String::new(),
        },
        steps,
    ))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::config::{Role, SocketName};
    use super::*;

    fn config(adjust: impl Fn(&mut MemifConfig)) -> Arc<MemifConfig> {
        let mut config =
            MemifConfig { ring: 8, ..MemifConfig::new(SocketName::Abstract("x".into()), Role::Client) };
        adjust(&mut config);
        Arc::new(config)
    }

    /// Starts both handshakes. Returns them and the client's answer to HELLO.
    fn start(
        server: &Arc<MemifConfig>,
        client: &Arc<MemifConfig>,
    ) -> (ServerHandshake, ClientHandshake, Result<HandshakeStep, RejectReason>) {
        let (server, hello) = ServerHandshake::new(server);
        let mut client = ClientHandshake::new(client);
        let step = client.on_message(hello);
        (server, client, step)
    }

    /// Runs both handshakes to the end, and returns the links of both sides. `tamper` may change the client's
    /// messages.
    fn run(
        server: &Arc<MemifConfig>,
        client: &Arc<MemifConfig>,
        mut tamper: impl FnMut(&mut ControlMessage, &mut Option<OwnedFd>),
    ) -> Result<(Box<NegotiatedLink>, Box<NegotiatedLink>), RejectReason> {
        let (mut server, mut client, mut step) = start(server, client);
        loop {
            let HandshakeStep::Send(mut message, mut descriptor) = step? else {
                return Err("not sent".into());
            };
            tamper(&mut message, &mut descriptor);
            match server.on_message(message, descriptor, false)? {
                HandshakeStep::Send(answer, _) => step = client.on_message(answer),
                HandshakeStep::Connect(link, answer) => match client.on_message(answer)? {
                    HandshakeStep::Connected(ours) => return Ok((link, ours)),
                    other => return Err(format!("{other:?}")),
                },
                other => return Err(format!("{other:?}")),
            }
        }
    }

    #[test]
    fn both_ends_agree_on_rings_and_features() {
        let many = config(|config| config.queues = 3);
        let (server, client) =
            run(&many, &config(|config| config.queues = 2), |_, _| {}).expect("handshake succeeds");
        for link in [&server, &client] {
            assert_eq!((link.to_server.len(), link.to_client.len()), (2, 2));
            assert!(!link.features.frame_headers, "a ring of 8 does not hold a super-frame");
        }
        assert!(server.to_server.iter().all(|offered| offered.ring.size() == 8 && offered.ring.has_cookie()));
        let large = config(|config| config.ring = 64);
        let (server, client) = run(&large, &large, |_, _| {}).expect("handshake succeeds");
        assert_eq!((server.features, client.features), (Features::ALL, Features::ALL));
        // A client that selects a hash that was not offered, or none, is accepted without hashes.
        for hash in [Some(7), None] {
            let (server, _) = run(&large, &large, |message, _| {
                if let ControlMessage::Init(init) = message {
                    init.features.hash = hash;
                }
            })
            .expect("handshake succeeds");
            assert_eq!(server.features, Features { frame_headers: true, hash: None });
        }
        let plain = config(|config| (config.ring, config.offload) = (64, false));
        for (a, b) in [(&large, &plain), (&plain, &large)] {
            let (server, client) = run(a, b, |_, _| {}).expect("handshake succeeds");
            assert!(!server.features.frame_headers && !client.features.frame_headers);
        }
    }

    #[test]
    fn client_messages_are_validated() {
        type Tamper = fn(&mut ControlMessage, &mut Option<OwnedFd>);
        let cases: [(&str, Tamper); 14] = [
            ("version", |m, _| {
                if let ControlMessage::Init(init) = m {
                    init.version += 1
                }
            }),
            ("only Ethernet", |m, _| {
                if let ControlMessage::Init(init) = m {
                    init.mode = 1
                }
            }),
            ("id not found", |m, _| {
                if let ControlMessage::Init(init) = m {
                    init.id = 9
                }
            }),
            ("features", |m, _| {
                if let ControlMessage::Init(init) = m {
                    init.features = Features::ALL
                }
            }),
            ("region without", |m, fd| {
                if let ControlMessage::AddRegion { .. } = m {
                    *fd = None
                }
            }),
            ("region index", |m, _| {
                if let ControlMessage::AddRegion { index, .. } = m {
                    *index = 1
                }
            }),
            ("region too large", |m, _| {
                if let ControlMessage::AddRegion { size, .. } = m {
                    *size = 1 << 40
                }
            }),
            ("region is smaller", |m, _| {
                if let ControlMessage::AddRegion { size, .. } = m {
                    *size += 1 << 20
                }
            }),
            ("ring without descriptor", |m, fd| {
                if let ControlMessage::AddRing(_) = m {
                    *fd = None
                }
            }),
            ("ring in an unknown", |m, _| {
                if let ControlMessage::AddRing(ring) = m {
                    ring.region = 1
                }
            }),
            ("ring is outside", |m, _| {
                if let ControlMessage::AddRing(ring) = m {
                    ring.offset = 1 << 30
                }
            }),
            ("ring is outside", |m, _| {
                if let ControlMessage::AddRing(ring) = m {
                    ring.log2 = 16
                }
            }),
            ("ring index", |m, _| {
                if let ControlMessage::AddRing(ring) = m {
                    ring.index = 5
                }
            }),
            ("ring added twice", |m, _| {
                if let ControlMessage::AddRing(ring) = m {
                    ring.to_server = true
                }
            }),
        ];
        let (server, client) = (config(|config| config.offload = false), config(|_| {}));
        for (expected, tamper) in cases {
            let refusal = run(&server, &client, tamper).expect_err(expected);
            assert!(refusal.starts_with(expected), "{expected}: {refusal}");
        }
    }

    #[test]
    fn messages_out_of_order_are_refused() {
        let config = config(|_| {});
        let connect = || ControlMessage::Connect { name: String::new() };
        let region = || ControlMessage::AddRegion { index: 0, size: 1 };
        for message in
            [ControlMessage::Ack, region(), connect(), ControlMessage::Connected { name: String::new() }]
        {
            let (mut server, _, _) = start(&config, &config);
            assert!(server.on_message(message, None, false).is_err());
        }
        let (mut server, mut client, step) = start(&config, &config);
        let Ok(HandshakeStep::Send(init, _)) = step else { panic!("INIT is sent") };
        assert!(server.on_message(init.clone(), None, false).is_ok());
        assert!(server.on_message(init, None, false).is_err(), "repeated message");
        assert!(server.on_message(connect(), None, false).is_err(), "no rings");
        let (_, hello) = ServerHandshake::new(&config);
        assert!(client.on_message(hello).is_err(), "repeated message");
        assert!(
            client.on_message(ControlMessage::Connected { name: String::new() }).is_err(),
            "CONNECTED before CONNECT"
        );
        let (mut server, mut client, mut step) = start(&config, &config);
        while let Ok(HandshakeStep::Send(message, descriptor)) = step {
            step = match server.on_message(message, descriptor, false).expect("valid message") {
                HandshakeStep::Send(answer, _) | HandshakeStep::Connect(_, answer) => {
                    client.on_message(answer)
                }
                other => panic!("{other:?}"),
            };
        }
        assert!(matches!(step, Ok(HandshakeStep::Connected(_))));
        assert!(server.on_message(region(), None, false).is_err(), "the handshake is complete");
        assert!(client.on_message(ControlMessage::Ack).is_err(), "the handshake is complete");
    }

    #[test]
    fn second_client_is_refused_as_busy() {
        let config = config(|_| {});
        let (mut server, _, step) = start(&config, &config);
        let Ok(HandshakeStep::Send(init, _)) = step else { panic!("INIT is sent") };
        assert_eq!(server.on_message(init, None, true).expect_err("busy"), "already connected");
    }
}
