//! What client and server say to each other before frames flow.
//!
//! ```text
//!   server                         client
//!   HELLO (limits, features)   →
//!                              ←   INIT (whom, secret, features chosen)
//!   ACK                        →
//!                              ←   ADD_REGION, with its memfd       once for each region
//!   ACK                        →
//!                              ←   ADD_RING, with its eventfd       once for each ring
//!   ACK                        →
//!                              ←   CONNECT
//!   CONNECTED                  →
//! ```
//!
//! Either may send DISCONNECT at any time. Anything else, or out of order, ends the connection.

use super::config::MemifConfig;
use super::extension::Features;
use super::message::{AddRing, Hello, Init, MODE_ETHERNET, Message, SECRET_BYTES, VERSION};
use super::port::Bell;
use super::region::Region;
use super::ring::{LOG2_MAX, Ring, ring_bytes};
use super::rx::Buffers;
use rustix::fd::OwnedFd;
use std::collections::VecDeque;
use std::sync::Arc;

/// Regions that a client may offer. One is enough; DPDK offers one for each list of memory segments.
const REGIONS_MAX: u16 = 16;
/// Offsets have 32 bits.
const REGION_BYTES_MAX: u64 = 1 << 32;

/// A ring with its bell and its buffers.
#[derive(Debug)]
pub(super) struct Offered {
    pub(super) ring: Ring,
    pub(super) bell: Bell,
    pub(super) buffers: Buffers,
}

/// All that a connection consists of.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) regions: Arc<[Arc<Region>]>,
    pub(super) to_server: Vec<Offered>,
    pub(super) to_client: Vec<Offered>,
    pub(super) features: Features,
    /// What the peer calls itself.
    pub(super) peer: String,
}

/// What to do after a message.
#[derive(Debug)]
pub(super) enum Step {
    Send(Message, Option<OwnedFd>),
    /// The server has all that it needs: it connects, then sends the message.
    Connect(Box<Link>, Message),
    /// The client is connected.
    Connected(Box<Link>),
    /// The peer has said goodbye.
    Leave(String),
}

/// Why the peer is sent away.
pub(super) type Refusal = String;

fn name_of(config: &MemifConfig) -> String {
    format!("ginnel {} memif{}", env!("CARGO_PKG_VERSION"), config.id)
}

fn features_of(config: &MemifConfig) -> Features {
    if config.offload { Features::ALL } else { Features::default() }
}

/// The server's side.
#[derive(Debug)]
pub(super) struct ServerHandshake {
    config: Arc<MemifConfig>,
    /// From INIT.
    client: Option<(String, Features)>,
    regions: Vec<Arc<Region>>,
    to_server: Vec<Option<Offered>>,
    to_client: Vec<Option<Offered>>,
    /// Nothing but a goodbye is expected any more.
    is_done: bool,
}

impl ServerHandshake {
    /// The handshake, and its first message.
    pub(super) fn new(config: &Arc<MemifConfig>) -> (Self, Message) {
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
        (handshake, Message::Hello(hello))
    }

    /// A client has said who it is, so that nobody else can be connected.
    pub(super) fn is_claimed(&self) -> bool {
        self.client.is_some()
    }

    fn is_setting_up(&self) -> bool {
        self.client.is_some() && !self.is_done
    }

    /// `busy`: another client is connected, or about to be.
    pub(super) fn on_message(
        &mut self,
        message: Message,
        descriptor: Option<OwnedFd>,
        busy: bool,
    ) -> Result<Step, Refusal> {
        match message {
            Message::Disconnect { reason, .. } => return Ok(Step::Leave(reason)),
            Message::Init(init) if self.client.is_none() => {
                self.check_init(&init, busy)?;
                let features = features_of(&self.config).and(init.features);
                if features.frame_headers != init.features.frame_headers {
                    return Err("features that were not offered".into());
                }
                self.client = Some((init.name, features));
            }
            Message::AddRegion { index, size } if self.is_setting_up() => {
                let descriptor = descriptor.ok_or("region without descriptor")?;
                if index >= REGIONS_MAX || usize::from(index) != self.regions.len() {
                    return Err("region index out of order".into());
                }
                let size = usize::try_from(size).ok().filter(|_| size <= REGION_BYTES_MAX);
                let size = size.ok_or("region too large")?;
                let region = Region::of_peer(&descriptor, size).map_err(|refused| refused.to_string())?;
                self.regions.push(Arc::new(region));
            }
            Message::AddRing(ring) if self.is_setting_up() => {
                self.add_ring(ring, descriptor.ok_or("ring without descriptor")?)?;
            }
            Message::Connect { .. } if self.is_setting_up() => {
                let link = self.connect()?;
                return Ok(Step::Connect(Box::new(link), Message::Connected { name: name_of(&self.config) }));
            }
            other => return Err(format!("unexpected message: {}", other.kind())),
        }
        Ok(Step::Send(Message::Ack, None))
    }

    fn check_init(&self, init: &Init, busy: bool) -> Result<(), Refusal> {
        let wrong = if init.version != VERSION {
            "version not supported"
        } else if init.mode != MODE_ETHERNET {
            "only Ethernet mode"
        } else if init.id != self.config.id {
            "id not found"
        } else if self.config.secret.is_some() && init.secret != secret_bytes(&self.config) {
            "wrong secret"
        } else if busy {
            "already connected"
        } else {
            return Ok(());
        };
        Err(wrong.into())
    }

    fn add_ring(&mut self, offer: AddRing, descriptor: OwnedFd) -> Result<(), Refusal> {
        let features = self.client.as_ref().map(|(_, features)| *features).unwrap_or_default();
        if features.frame_headers && usize::from(offer.private_header_bytes) != features.header_bytes() {
            return Err("frame header of another size".into());
        }
        let region = self.regions.get(usize::from(offer.region)).ok_or("ring in an unknown region")?;
        let ring = Ring::new(region, offer.offset as usize, offer.log2)
            .ok_or("ring is outside its region, not aligned or of a size that is not allowed")?;
        let bell = Bell::of_peer(descriptor).ok_or("ring without eventfd")?;
        let rings = if offer.to_server { &mut self.to_server } else { &mut self.to_client };
        let slot = rings.get_mut(usize::from(offer.index)).ok_or("ring index too large")?;
        if slot.is_some() {
            return Err("ring added twice".into());
        }
        *slot = Some(Offered { ring, bell, buffers: Buffers::Peers });
        Ok(())
    }

    fn connect(&mut self) -> Result<Link, Refusal> {
        let (peer, features) = self.client.clone().unwrap_or_default();
        let rings = |rings: &mut Vec<Option<Offered>>| {
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
        Ok(Link { regions, to_server, to_client, features, peer })
    }
}

fn secret_bytes(config: &MemifConfig) -> [u8; SECRET_BYTES] {
    let mut bytes = [0; SECRET_BYTES];
    let secret = config.secret.as_deref().unwrap_or_default().as_bytes();
    let len = secret.len().min(SECRET_BYTES);
    bytes[..len].copy_from_slice(&secret[..len]);
    bytes
}

/// The client's side.
#[derive(Debug)]
pub(super) struct ClientHandshake {
    config: Arc<MemifConfig>,
    /// What is sent next, each after an ACK.
    steps: VecDeque<(Message, Option<OwnedFd>)>,
    /// From HELLO on, until it is connected.
    link: Option<Box<Link>>,
    /// HELLO has come. A second one is not expected.
    is_greeted: bool,
}

impl ClientHandshake {
    pub(super) fn new(config: &Arc<MemifConfig>) -> Self {
        Self { config: config.clone(), steps: VecDeque::new(), link: None, is_greeted: false }
    }

    pub(super) fn on_message(&mut self, message: Message) -> Result<Step, Refusal> {
        match message {
            Message::Disconnect { reason, .. } => Ok(Step::Leave(reason)),
            Message::Hello(hello) if !self.is_greeted => {
                self.is_greeted = true;
                let failed = |error: std::io::Error| format!("no memory for rings and buffers: {error}");
                self.build(&hello)?.map_err(failed)?;
                self.next()
            }
            Message::Ack if !self.steps.is_empty() => self.next(),
            Message::Connected { .. } if self.steps.is_empty() => {
                let link = self.link.take().ok_or("unexpected message: connected")?;
                Ok(Step::Connected(link))
            }
            other => Err(format!("unexpected message: {}", other.kind())),
        }
    }

    fn next(&mut self) -> Result<Step, Refusal> {
        let (message, descriptor) = self.steps.pop_front().ok_or("unexpected message: ack")?;
        Ok(Step::Send(message, descriptor))
    }

    /// Makes the memory, and all messages about it.
    fn build(&mut self, hello: &Hello) -> Result<std::io::Result<()>, Refusal> {
        if !(hello.version_min..=hello.version_max).contains(&VERSION) {
            return Err("version not supported".into());
        }
        let config = &self.config;
        let log2 = config.ring_log2().min(hello.ring_log2_max);
        let features = features_of(config).and(hello.features);
        let to_server = config.queues.min(hello.ring_to_server_max.saturating_add(1));
        let to_client = config.queues.min(hello.ring_to_client_max.saturating_add(1));
        Ok(memory(config, log2, to_server, to_client, features).map(|(mut link, steps)| {
            link.peer.clone_from(&hello.name);
            self.link = Some(Box::new(link));
            self.steps = steps;
        }))
    }
}

type Steps = VecDeque<(Message, Option<OwnedFd>)>;

/// One region with all rings, and behind them the buffers of each. Size, which the configuration bounds: below 4 GiB.
fn memory(
    config: &MemifConfig,
    log2: u8,
    to_server: u16,
    to_client: u16,
    features: Features,
) -> std::io::Result<(Link, Steps)> {
    let rings = usize::from(to_server) + usize::from(to_client);
    let buffers_at = (rings * ring_bytes(log2)).next_multiple_of(4096);
    let buffer_bytes = config.buffer_bytes;
    let ring_buffers = (buffer_bytes as usize) << log2;
    let size = buffers_at + rings * ring_buffers;
    let (region, memfd) = Region::create(size)?;
    let region = Arc::new(region);
    // A header in front of frames is of use only if the largest frame fits.
    let features = if super::HEADED_BYTES_MAX <= ring_buffers { features } else { Features::default() };

    let mut steps = Steps::new();
    let init = Init {
        version: VERSION,
        id: config.id,
        mode: MODE_ETHERNET,
        secret: secret_bytes(config),
        name: name_of(config),
        features,
    };
    steps.push_back((Message::Init(init), None));
    steps.push_back((Message::AddRegion { index: 0, size: size as u64 }, Some(memfd)));
    let mut offer = |number: usize, to_server: bool, index: u16| -> std::io::Result<Offered> {
        let offset = number * ring_bytes(log2);
        let ring = Ring::new(&region, offset, log2).ok_or(std::io::ErrorKind::InvalidInput)?;
        ring.initialise();
        let bell = Bell::new()?;
        let message = AddRing {
            to_server,
            index,
            region: 0,
            offset: offset as u32,
            log2,
            private_header_bytes: features.header_bytes() as u16,
        };
        steps.push_back((Message::AddRing(message), Some(bell.fd().try_clone()?)));
        let at = (buffers_at + number * ring_buffers) as u32;
        let buffers = Buffers::Own { at, bytes: buffer_bytes };
        // Whoever reads the descriptors finds its buffers there, even before the ring is used.
        buffers.describe(&ring);
        Ok(Offered { ring, bell, buffers })
    };
    let mut numbers = 0..rings;
    let mut all = |to_server: bool, count: u16| -> std::io::Result<Vec<Offered>> {
        (0..count).zip(&mut numbers).map(|(index, number)| offer(number, to_server, index)).collect()
    };
    let (to_server, to_client) = (all(true, to_server)?, all(false, to_client)?);
    steps.push_back((Message::Connect { name: name_of(config) }, None));
    Ok((
        Link { regions: Arc::new([region.clone()]), to_server, to_client, features, peer: String::new() },
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

    /// Both sides, and the client's answer to the server's first message.
    fn start(
        server: &Arc<MemifConfig>,
        client: &Arc<MemifConfig>,
    ) -> (ServerHandshake, ClientHandshake, Result<Step, Refusal>) {
        let (server, hello) = ServerHandshake::new(server);
        let mut client = ClientHandshake::new(client);
        let step = client.on_message(hello);
        (server, client, step)
    }

    /// Runs it to the end, and returns what each side has then. `tamper` may change the client's messages.
    fn run(
        server: &Arc<MemifConfig>,
        client: &Arc<MemifConfig>,
        mut tamper: impl FnMut(&mut Message, &mut Option<OwnedFd>),
    ) -> Result<(Box<Link>, Box<Link>), Refusal> {
        let (mut server, mut client, mut step) = start(server, client);
        loop {
            let Step::Send(mut message, mut descriptor) = step? else { return Err("not sent".into()) };
            tamper(&mut message, &mut descriptor);
            match server.on_message(message, descriptor, false)? {
                Step::Send(answer, _) => step = client.on_message(answer),
                Step::Connect(link, answer) => match client.on_message(answer)? {
                    Step::Connected(ours) => return Ok((link, ours)),
                    other => return Err(format!("{other:?}")),
                },
                other => return Err(format!("{other:?}")),
            }
        }
    }

    #[test]
    fn both_ends_agree_on_rings_and_features() {
        let many = config(|config| config.queues = 3);
        let (server, client) = run(&many, &config(|config| config.queues = 2), |_, _| {}).expect("agreed");
        for link in [&server, &client] {
            assert_eq!((link.to_server.len(), link.to_client.len()), (2, 2));
            assert!(!link.features.frame_headers, "a ring of 8 does not hold a super-frame");
        }
        assert!(server.to_server.iter().all(|offered| offered.ring.size() == 8 && offered.ring.has_cookie()));
        let large = config(|config| config.ring = 64);
        let (server, client) = run(&large, &large, |_, _| {}).expect("agreed");
        assert_eq!((server.features, client.features), (Features::ALL, Features::ALL));
        // A client that means another hash than was offered, or says nothing of one, is taken without.
        for hash in [Some(7), None] {
            let (server, _) = run(&large, &large, |message, _| {
                if let Message::Init(init) = message {
                    init.features.hash = hash;
                }
            })
            .expect("agreed");
            assert_eq!(server.features, Features { frame_headers: true, hash: None });
        }
        let plain = config(|config| (config.ring, config.offload) = (64, false));
        for (a, b) in [(&large, &plain), (&plain, &large)] {
            let (server, client) = run(a, b, |_, _| {}).expect("agreed");
            assert!(!server.features.frame_headers && !client.features.frame_headers);
        }
    }

    #[test]
    fn what_a_client_says_is_checked() {
        type Tamper = fn(&mut Message, &mut Option<OwnedFd>);
        let cases: [(&str, Tamper); 14] = [
            ("version", |m, _| {
                if let Message::Init(init) = m {
                    init.version += 1
                }
            }),
            ("only Ethernet", |m, _| {
                if let Message::Init(init) = m {
                    init.mode = 1
                }
            }),
            ("id not found", |m, _| {
                if let Message::Init(init) = m {
                    init.id = 9
                }
            }),
            ("features", |m, _| {
                if let Message::Init(init) = m {
                    init.features = Features::ALL
                }
            }),
            ("region without", |m, fd| {
                if let Message::AddRegion { .. } = m {
                    *fd = None
                }
            }),
            ("region index", |m, _| {
                if let Message::AddRegion { index, .. } = m {
                    *index = 1
                }
            }),
            ("region too large", |m, _| {
                if let Message::AddRegion { size, .. } = m {
                    *size = 1 << 40
                }
            }),
            ("region is smaller", |m, _| {
                if let Message::AddRegion { size, .. } = m {
                    *size += 1 << 20
                }
            }),
            ("ring without descriptor", |m, fd| {
                if let Message::AddRing(_) = m {
                    *fd = None
                }
            }),
            ("ring in an unknown", |m, _| {
                if let Message::AddRing(ring) = m {
                    ring.region = 1
                }
            }),
            ("ring is outside", |m, _| {
                if let Message::AddRing(ring) = m {
                    ring.offset = 1 << 30
                }
            }),
            ("ring is outside", |m, _| {
                if let Message::AddRing(ring) = m {
                    ring.log2 = 16
                }
            }),
            ("ring index", |m, _| {
                if let Message::AddRing(ring) = m {
                    ring.index = 5
                }
            }),
            ("ring added twice", |m, _| {
                if let Message::AddRing(ring) = m {
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
        let connect = || Message::Connect { name: String::new() };
        let region = || Message::AddRegion { index: 0, size: 1 };
        for message in [Message::Ack, region(), connect(), Message::Connected { name: String::new() }] {
            let (mut server, _, _) = start(&config, &config);
            assert!(server.on_message(message, None, false).is_err());
        }
        let (mut server, mut client, step) = start(&config, &config);
        let Ok(Step::Send(init, _)) = step else { panic!("INIT comes first") };
        assert!(server.on_message(init.clone(), None, false).is_ok());
        assert!(server.on_message(init, None, false).is_err(), "twice");
        assert!(server.on_message(connect(), None, false).is_err(), "without rings");
        let (_, hello) = ServerHandshake::new(&config);
        assert!(client.on_message(hello).is_err(), "twice");
        assert!(client.on_message(Message::Connected { name: String::new() }).is_err(), "too early");
        let (mut server, mut client, mut step) = start(&config, &config);
        while let Ok(Step::Send(message, descriptor)) = step {
            step = match server.on_message(message, descriptor, false).expect("by the rules") {
                Step::Send(answer, _) | Step::Connect(_, answer) => client.on_message(answer),
                other => panic!("{other:?}"),
            };
        }
        assert!(matches!(step, Ok(Step::Connected(_))));
        assert!(server.on_message(region(), None, false).is_err(), "all is said");
        assert!(client.on_message(Message::Ack).is_err(), "all is said");
    }

    #[test]
    fn the_second_client_is_told_that_somebody_is_there() {
        let config = config(|_| {});
        let (mut server, _, step) = start(&config, &config);
        let Ok(Step::Send(init, _)) = step else { panic!("INIT comes first") };
        assert_eq!(server.on_message(init, None, true).expect_err("busy"), "already connected");
    }
}
