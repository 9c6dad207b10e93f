//! Settings of an interface that ethtool(8) reads and changes, by the requests of `linux/ethtool.h`: driver,
//! queues, interrupt coalescing, features, and the table that distributes received frames to queues.
#![allow(unsafe_code)] // an ioctl's argument has the type that its number says

pub(crate) mod flow_filters;

use rustix::io::Errno;
use rustix::ioctl::{self, Ioctl, IoctlOutput, Opcode};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const SIOCETHTOOL: Opcode = 0x8946;
const ETHTOOL_GDRVINFO: u32 = 0x03;
const ETHTOOL_GCOALESCE: u32 = 0x0e;
const ETHTOOL_SCOALESCE: u32 = 0x0f;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GRXFH: u32 = 0x29;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GRXFHINDIR: u32 = 0x38;
const ETHTOOL_SRXFHINDIR: u32 = 0x39;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_SFEATURES: u32 = 0x3b;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
const ETHTOOL_SCHANNELS: u32 = 0x3d;
const ETHTOOL_GRSSH: u32 = 0x46;
/// The set of strings that names the features.
const ETH_SS_FEATURES: u32 = 4;
/// Bytes of a name in a set of strings.
const STRING_BYTES: usize = 32;
/// Most features and most entries of a table that are read; kernels and drivers have fewer.
const FEATURES_MAX: usize = 1024;
const TABLE_ENTRIES_MAX: usize = 1 << 16;

/// Numbers of 32-bit words of the structures with a fixed size.
const DRIVER_INFO_WORDS: usize = 49;
const CHANNELS_WORDS: usize = 9;
const COALESCE_WORDS: usize = 23;
const FLOW_RULE_WORDS: usize = 48;
/// Number of words of `struct ethtool_rxfh` in front of table and key.
const RSS_HEADER_WORDS: usize = 6;
/// Longest key that is read, in bytes; adapters have 40 or 52.
const KEY_BYTES_MAX: usize = 256;
/// Indices of words of `struct ethtool_coalesce`.
const RX_USECS: usize = 1;
const RX_FRAMES: usize = 2;
const ADAPTIVE_RX: usize = 10;

/// The driver of an interface (`ethtool -i`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverInfo {
    /// Name of the driver.
    pub name: String,
    /// Its version; for drivers of the kernel's tree usually that of the kernel.
    pub version: String,
    /// Version of the device's firmware; empty if the driver does not say.
    pub firmware: String,
}

/// The numbers of queues of an interface (`ethtool -l`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Channels {
    /// Largest number of queues that only receive.
    pub rx_max: u32,
    /// Largest number of queues that receive and send.
    pub combined_max: u32,
    /// Queues that only receive.
    pub rx: u32,
    /// Queues that only send.
    pub tx: u32,
    /// Queues that receive and send.
    pub combined: u32,
}

/// When the interface interrupts for received frames (`ethtool -c`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalescing {
    /// The driver adapts the time to the rate.
    pub adaptive_rx: bool,
    /// Longest time that a frame waits for an interrupt, in microseconds; 0 stands for no time limit.
    pub rx_usecs: u32,
    /// Frames after which an interrupt is sent; 0 stands for no limit.
    pub rx_frames: u32,
}

/// A feature of an interface (`ethtool -k`), under the kernel's name for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Feature {
    /// Name, such as `rx-gro`.
    pub name: String,
    /// The feature is in use.
    pub on: bool,
    /// The feature cannot be changed.
    pub fixed: bool,
}

/// How an interface distributes received frames to its queues by their hash (`ethtool -x`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RssSettings {
    /// Hash functions in use, a bit for each (`ETH_RSS_HASH_TOP` and so on).
    pub functions: u8,
    /// Transform of the fields before they are hashed (`RXH_XFRM_SYM_XOR` and so on); 0 for none.
    pub transform: u8,
    /// Key of the function.
    pub key: Vec<u8>,
    /// Queue of each entry of the indirection table.
    pub queues: Vec<u32>,
}

/// `struct ifreq` as SIOCETHTOOL reads it.
#[repr(C)]
struct EthtoolRequest {
    name: [u8; 16],
    data: *mut c_void,
    padding: [u8; 16],
}

const _: () = assert!(size_of::<EthtoolRequest>() == size_of::<libc::ifreq>());

/// A request to an interface.
struct EthtoolCall(EthtoolRequest);

// SAFETY: SIOCETHTOOL takes an `ifreq`, and with the commands of this module reads and writes the structure
// that `data` points to, which outlives the call.
unsafe impl Ioctl for EthtoolCall {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        SIOCETHTOOL
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::from_mut(&mut self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Opens a socket through which the interfaces of the thread's network namespace are reached.
fn open_socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
}

/// Calls the kernel with a structure whose first word is its command.
///
/// # Safety
/// As of [`call_through`].
unsafe fn call(interface: &str, structure: &mut [u32]) -> Result<(), Errno> {
    // SAFETY: as the caller says.
    unsafe { call_through(&open_socket()?, interface, structure) }
}

/// Calls the kernel for an interface in the network namespace of a socket.
///
/// # Safety
/// `structure` has at least the length of the command's structure, with the elements that its words announce.
unsafe fn call_through(socket: impl AsFd, interface: &str, structure: &mut [u32]) -> Result<(), Errno> {
    let mut name = [0; 16];
    if interface.len() >= name.len() || interface.contains('\0') {
        return Err(Errno::NODEV);
    }
    name[..interface.len()].copy_from_slice(interface.as_bytes());
    let request = EthtoolRequest { name, data: structure.as_mut_ptr().cast(), padding: [0; 16] };
    // SAFETY: as `EthtoolCall` and the caller say; `structure` outlives the call.
    unsafe { ioctl::ioctl(socket, EthtoolCall(request)) }
}

/// Calls the kernel with a structure of a fixed size. Returns `None` if the driver does not support the
/// command, or the process has no permission for it.
fn query<const WORDS: usize>(interface: &str, command: u32) -> io::Result<Option<[u32; WORDS]>> {
    let mut structure = [0; WORDS];
    structure[0] = command;
    // SAFETY: the callers give the length of the command's structure.
    match unsafe { call(interface, &mut structure) } {
        Ok(()) => Ok(Some(structure)),
        Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn bytes_of(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn text(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Returns the driver of an interface, or `None` if it does not say.
///
/// # Errors
/// There is no such interface.
pub fn driver_info(interface: &str) -> io::Result<Option<DriverInfo>> {
    let Some(words) = query::<DRIVER_INFO_WORDS>(interface, ETHTOOL_GDRVINFO)? else { return Ok(None) };
    let bytes = bytes_of(&words[1..]);
    let [name, version, firmware] = [0, 32, 64].map(|at| text(&bytes[at..at + STRING_BYTES]));
    Ok((!name.is_empty()).then_some(DriverInfo { name, version, firmware }))
}

/// Returns the name of an interface's driver, if the kernel tells.
pub(crate) fn driver(interface: &str) -> Option<String> {
    driver_info(interface).ok()?.map(|info| info.name)
}

/// Returns the numbers of queues, or `None` if the driver does not report them.
///
/// # Errors
/// There is no such interface.
pub fn channels(interface: &str) -> io::Result<Option<Channels>> {
    let words = query::<CHANNELS_WORDS>(interface, ETHTOOL_GCHANNELS)?;
    Ok(words.map(|words| Channels {
        rx_max: words[1],
        combined_max: words[4],
        rx: words[5],
        tx: words[6],
        combined: words[8],
    }))
}

/// Returns the number of receive queues of an interface: one if the driver does not report it.
pub(crate) fn rx_queue_count(interface: &str) -> io::Result<usize> {
    Ok(channels(interface)?.map_or(1, |channels| (channels.rx + channels.combined).max(1) as usize))
}

/// Sets the numbers of queues that receive, that send, and that do both.
///
/// # Errors
/// There is no such interface, the process lacks CAP_NET_ADMIN, or the driver does not permit these numbers.
pub fn set_channels(interface: &str, rx: u32, tx: u32, combined: u32) -> io::Result<()> {
    let words = query::<CHANNELS_WORDS>(interface, ETHTOOL_GCHANNELS)?;
    let mut words = words.ok_or_else(|| io::Error::from(Errno::OPNOTSUPP))?;
    words[0] = ETHTOOL_SCHANNELS;
    (words[5], words[6], words[8]) = (rx, tx, combined);
    // SAFETY: `struct ethtool_channels` has nine words.
    Ok(unsafe { call(interface, &mut words) }?)
}

/// Returns when the interface interrupts, or `None` if the driver does not say.
///
/// # Errors
/// There is no such interface.
pub fn coalescing(interface: &str) -> io::Result<Option<Coalescing>> {
    let words = query::<COALESCE_WORDS>(interface, ETHTOOL_GCOALESCE)?;
    Ok(words.map(|words| Coalescing {
        adaptive_rx: words[ADAPTIVE_RX] != 0,
        rx_usecs: words[RX_USECS],
        rx_frames: words[RX_FRAMES],
    }))
}

/// Sets when the interface interrupts for received frames. Other values of coalescing stay as they are.
///
/// # Errors
/// There is no such interface, the process lacks CAP_NET_ADMIN, or the driver does not permit these values.
pub fn set_coalescing(interface: &str, values: Coalescing) -> io::Result<()> {
    let words = query::<COALESCE_WORDS>(interface, ETHTOOL_GCOALESCE)?;
    let mut words = words.ok_or_else(|| io::Error::from(Errno::OPNOTSUPP))?;
    words[0] = ETHTOOL_SCOALESCE;
    words[ADAPTIVE_RX] = values.adaptive_rx.into();
    words[RX_USECS] = values.rx_usecs;
    words[RX_FRAMES] = values.rx_frames;
    // SAFETY: `struct ethtool_coalesce` has 23 words.
    Ok(unsafe { call(interface, &mut words) }?)
}

/// Returns the names of all features in the kernel's order; a feature without a name has an empty one.
fn feature_names(interface: &str) -> io::Result<Vec<String>> {
    // The command, a reserved word, the mask of wanted sets (64 bits), and the number of strings of the set.
    let mut info = [ETHTOOL_GSSET_INFO, 0, 0, 0, 0];
    // The low word of the mask.
    info[if cfg!(target_endian = "little") { 2 } else { 3 }] = 1 << ETH_SS_FEATURES;
    // SAFETY: `struct ethtool_sset_info` with one number, for the one set of the mask.
    unsafe { call(interface, &mut info) }?;
    let count = info[4] as usize;
    if count > FEATURES_MAX {
        return Err(io::ErrorKind::Unsupported.into());
    }
    let mut names = vec![0; 3 + count * STRING_BYTES / size_of::<u32>()];
    names[..3].copy_from_slice(&[ETHTOOL_GSTRINGS, ETH_SS_FEATURES, count as u32]);
    // SAFETY: `struct ethtool_gstrings` with `count` strings, the number that the kernel has reported.
    unsafe { call(interface, &mut names) }?;
    Ok(bytes_of(&names[3..]).chunks(STRING_BYTES).map(text).collect())
}

/// Returns the features of an interface in the kernel's order.
///
/// # Errors
/// There is no such interface.
pub fn features(interface: &str) -> io::Result<Vec<Feature>> {
    let names = feature_names(interface)?;
    let blocks = names.len().div_ceil(32);
    // For each 32 features: available, requested, active, never changed.
    let mut bits = vec![0; 2 + 4 * blocks];
    bits[..2].copy_from_slice(&[ETHTOOL_GFEATURES, blocks as u32]);
    // SAFETY: `struct ethtool_gfeatures` with `blocks` blocks, as its second word says.
    unsafe { call(interface, &mut bits) }?;
    let feature = |(index, name): (usize, String)| {
        let block = &bits[2 + 4 * (index / 32)..][..4];
        let [available, active, never] =
            [block[0], block[2], block[3]].map(|word| word >> (index % 32) & 1 == 1);
        Feature { name, on: active, fixed: never || !available }
    };
    Ok(names.into_iter().enumerate().map(feature).filter(|feature| !feature.name.is_empty()).collect())
}

/// Switches a feature on or off. The kernel may accept the request without fulfilling it: read the features
/// again.
///
/// # Errors
/// There is no such interface or feature, or the kernel does not permit the change.
pub fn set_feature(interface: &str, name: &str, on: bool) -> io::Result<()> {
    let names = feature_names(interface)?;
    let index = names.iter().position(|known| known == name);
    let index = index.ok_or_else(|| io::Error::from(Errno::OPNOTSUPP))?;
    let total = names.len().div_ceil(32);
    // For each 32 features: which of them are changed, and to what.
    let mut bits = vec![0; 2 + 2 * total];
    bits[..2].copy_from_slice(&[ETHTOOL_SFEATURES, total as u32]);
    bits[2 + 2 * (index / 32)] = 1 << (index % 32);
    bits[3 + 2 * (index / 32)] = u32::from(on) << (index % 32);
    // SAFETY: `struct ethtool_sfeatures` with `total` blocks, as its second word says.
    Ok(unsafe { call(interface, &mut bits) }?)
}

/// Returns the table that distributes received frames to queues by their hash (`ethtool -x`), or `None` if
/// the driver has none.
///
/// # Errors
/// There is no such interface.
pub fn indirection(interface: &str) -> io::Result<Option<Vec<u32>>> {
    let Some([_, size]) = query::<2>(interface, ETHTOOL_GRXFHINDIR)? else { return Ok(None) };
    let size = size as usize;
    if !(1..=TABLE_ENTRIES_MAX).contains(&size) {
        return Ok(None);
    }
    let mut table = vec![0; 2 + size];
    table[..2].copy_from_slice(&[ETHTOOL_GRXFHINDIR, size as u32]);
    // SAFETY: `struct ethtool_rxfh_indir` with `size` entries, as its second word says.
    unsafe { call(interface, &mut table) }?;
    Ok(Some(table.split_off(2)))
}

/// Returns how an interface distributes received frames to its queues, or `None` if the driver does not tell.
///
/// # Errors
/// There is no such interface, or another process has changed the settings meanwhile.
pub fn rss(interface: &str) -> io::Result<Option<RssSettings>> {
    // Without room for table and key, their sizes are returned.
    let Some(header) = query::<RSS_HEADER_WORDS>(interface, ETHTOOL_GRSSH)? else { return Ok(None) };
    let Some(words) = rss_words(&header) else { return Ok(None) };
    let mut answer = vec![0; words];
    answer[0] = ETHTOOL_GRSSH;
    answer[RSS_SIZES].copy_from_slice(&header[RSS_SIZES]);
    // SAFETY: `struct ethtool_rxfh` with room for a table and a key of the sizes that its words say.
    unsafe { call(interface, &mut answer) }?;
    Ok(parse_rss(&answer))
}

/// Indices of the words of `struct ethtool_rxfh` that hold the number of table entries and of key bytes.
const RSS_SIZES: core::ops::Range<usize> = 2..4;

/// Returns the number of words of an answer with this header; `None` for sizes that no driver has.
fn rss_words(header: &[u32]) -> Option<usize> {
    let &[entries, key_bytes] = header.get(RSS_SIZES)? else { return None };
    let (entries, key_bytes) = (entries as usize, key_bytes as usize);
    let is_known = entries <= TABLE_ENTRIES_MAX && key_bytes <= KEY_BYTES_MAX;
    is_known.then(|| RSS_HEADER_WORDS + entries + key_bytes.div_ceil(size_of::<u32>()))
}

/// Reads the answer of a driver, `struct ethtool_rxfh`. Returns `None` if it is cut.
fn parse_rss(answer: &[u32]) -> Option<RssSettings> {
    let body = answer.get(RSS_HEADER_WORDS..rss_words(answer)?)?;
    let (queues, key) = body.split_at_checked(answer[RSS_SIZES.start] as usize)?;
    let mut key = bytes_of(key);
    key.truncate(answer[RSS_SIZES.start + 1] as usize);
    let [functions, transform, ..] = answer[RSS_SIZES.end].to_ne_bytes();
    Some(RssSettings { functions, transform, key, queues: queues.to_vec() })
}

/// Returns the fields that the interface hashes (`RXH_IP_SRC` and so on) in packets of `flow_type`
/// (`TCP_V4_FLOW` and so on), or `None` if the driver does not tell.
///
/// # Errors
/// There is no such interface.
pub fn hashed_fields(interface: &str, flow_type: u32) -> io::Result<Option<u64>> {
    let mut structure = [0; FLOW_RULE_WORDS];
    structure[..2].copy_from_slice(&[ETHTOOL_GRXFH, flow_type]);
    // SAFETY: `struct ethtool_rxnfc` has 48 words, without locations of rules.
    match unsafe { call(interface, &mut structure) } {
        Ok(()) => {
            let [first, second] = [structure[2], structure[3]].map(u32::to_ne_bytes);
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&first);
            bytes[4..].copy_from_slice(&second);
            Ok(Some(u64::from_ne_bytes(bytes)))
        }
        Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Replaces the table that distributes received frames to queues; an empty one stands for the driver's
/// default.
///
/// # Errors
/// There is no such interface, the process lacks CAP_NET_ADMIN, or the driver does not permit this table.
pub fn set_indirection(interface: &str, queues: &[u32]) -> io::Result<()> {
    let size = u32::try_from(queues.len()).map_err(|_| io::Error::from(Errno::INVAL))?;
    let mut table = [&[ETHTOOL_SRXFHINDIR, size], queues].concat();
    // SAFETY: `struct ethtool_rxfh_indir` with `size` entries, as its second word says.
    Ok(unsafe { call(interface, &mut table) }?)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_testkit::interop::in_namespace;

    #[test]
    fn loopback_has_features_and_no_queues() {
        let features = features("lo").unwrap();
        let feature = |name: &str| features.iter().find(|feature| feature.name == name).unwrap();
        assert!(feature("loopback").on && feature("loopback").fixed, "{features:?}");
        assert!(!feature("rx-gro").fixed);
        assert_eq!(channels("lo").unwrap(), None);
        assert_eq!(coalescing("lo").unwrap(), None);
        assert_eq!(indirection("lo").unwrap(), None);
        assert_eq!((rss("lo").unwrap(), hashed_fields("lo", 1).unwrap()), (None, None));
    }

    /// Builds answers as the kernel lays them out: a header, the table, and the key. Adapters have 128
    /// entries and a key of 40 bytes, or 512 entries and a key of 52 bytes; the other sizes are special
    /// cases.
    #[test]
    fn key_and_table_are_read_from_answers() {
        for (entries, key_bytes, queues) in [(128_u32, 40_u8, 4), (512, 52, 3), (0, 40, 1), (64, 41, 2)] {
            let mut answer = vec![ETHTOOL_GRSSH, 0, entries, key_bytes.into(), 0, 0];
            answer[4] = u32::from_ne_bytes([1, 2, 0, 0]);
            answer.extend((0..entries).map(|entry| entry % queues));
            let key: Vec<u8> = (1..=key_bytes).collect();
            for bytes in key.chunks(4) {
                let mut word = [0; 4];
                word[..bytes.len()].copy_from_slice(bytes);
                answer.push(u32::from_ne_bytes(word));
            }
            let read = parse_rss(&answer).unwrap();
            assert_eq!((read.functions, read.transform, read.key), (1, 2, key));
            assert!(read.queues.into_iter().eq((0..entries).map(|entry| entry % queues)));
            answer.pop();
            assert_eq!(parse_rss(&answer), None, "a cut answer");
        }
        for sizes in [[1 << 17, 40], [128, 257], [u32::MAX; 2]] {
            let answer = [&[ETHTOOL_GRSSH, 0], &sizes[..], &[0; 1000]].concat();
            assert_eq!(parse_rss(&answer), None, "{sizes:?}");
        }
        assert_eq!(parse_rss(&[ETHTOOL_GRSSH]), None);
    }

    #[test]
    fn a_missing_interface_is_an_error() {
        for name in ["nonesuch", "longer-than-any-interface", "", "a\0b"] {
            for error in [driver_info(name).unwrap_err(), channels(name).unwrap_err()] {
                assert_eq!(error.raw_os_error(), Some(Errno::NODEV.raw_os_error()), "{name:?}");
            }
            assert!(features(name).is_err() && set_feature(name, "rx-gro", false).is_err());
        }
    }

    fn ip(arguments: &str) {
        let output = std::process::Command::new("ip").args(arguments.split(' ')).output().expect("ip runs");
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn changed_settings_are_read_again() {
        in_namespace("ethtool::tests::changed_settings_are_read_again", || {
            ip("link add a0 numrxqueues 4 numtxqueues 4 type veth peer name a1");
            let queues = |rx, tx| Channels { rx_max: 4, combined_max: 0, rx, tx, combined: 0 };
            set_channels("a0", 3, 2, 0).unwrap();
            assert_eq!(channels("a0").unwrap(), Some(queues(3, 2)));
            assert!(set_channels("a0", 5, 5, 0).is_err());
            assert_eq!(rx_queue_count("a0").unwrap(), 3);

            let is_on = || features("a0").unwrap().into_iter().any(|one| one.name == "rx-gro" && one.on);
            for on in [true, false] {
                set_feature("a0", "rx-gro", on).unwrap();
                assert_eq!(is_on(), on);
            }
            assert!(set_feature("a0", "rx-nonsense", true).is_err());
            assert!(set_indirection("a0", &[0]).is_err(), "it has no table");

            // The driver of TAP interfaces limits the frames to 64.
            ip("tuntap add t0 mode tap");
            let frames = |rx_frames| Coalescing { rx_frames, ..Coalescing::default() };
            set_coalescing("t0", frames(1000)).unwrap();
            assert_eq!(coalescing("t0").unwrap(), Some(frames(64)));
            assert!(set_coalescing("t0", Coalescing { rx_usecs: 7, ..frames(1) }).is_err());
            assert_eq!(driver_info("t0").unwrap().unwrap().name, "tun");
        });
    }
}
