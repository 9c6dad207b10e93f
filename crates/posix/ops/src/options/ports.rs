//! The choice of a local port for a socket without one: `IP_LOCAL_PORT_RANGE`.

use super::SocketOptionState;
use crate::fd_table::FileId;
use crate::process::ProcessState;
use rustix::io::Errno;
use std::hash::{BuildHasher, RandomState};

/// Option number, for which libc has no name.
pub(super) const LOCAL_PORT_RANGE: core::ffi::c_int = 51;

/// Parses the option: the lowest port in the lower half, the highest in the upper half; 0 stands for the
/// limit of the stack.
///
/// # Errors
/// `EINVAL`.
pub(super) fn read(value: &[u8]) -> Result<u32, Errno> {
    let range = u32::from_ne_bytes(value.try_into().map_err(|_| Errno::INVAL)?);
    let (low, high) = low_high(range);
    if low != 0 && high != 0 && low > high { Err(Errno::INVAL) } else { Ok(range) }
}

fn low_high(range: u32) -> (u16, u16) {
    (range as u16, (range >> 16) as u16)
}

impl SocketOptionState {
    /// Returns whether `bind` without a port leaves the choice of one to later calls.
    pub fn binds_without_port(&self) -> bool {
        self.is_on("IP_BIND_ADDRESS_NO_PORT")
    }

    /// Returns whether the program restricts the choice of a port.
    pub fn has_port_range(&self) -> bool {
        self.port_range != 0
    }

    /// Returns the ports to try, starting with a random one, if the stack chooses ports from `first` to
    /// `last` (`net.ipv4.ip_local_port_range`), which limit the option. Returns `None` if the stack chooses
    /// (`inet_sk_get_local_port_range`).
    fn ports_between(&self, (first, last): (u16, u16)) -> Option<impl Iterator<Item = u16> + use<>> {
        let (low, high) = low_high(self.port_range);
        let within = |port: u16| (first..=last).contains(&port);
        if self.port_range == 0 || !within(low) && !within(high) {
            return None;
        }
        let low = if within(low) { low } else { first };
        let high = if within(high) { high } else { last };
        let count = u32::from(high - low) + 1;
        // Each hasher has random keys.
        let start = (RandomState::new().hash_one(()) % u64::from(count)) as u32;
        // Cannot truncate: the remainder is below the number of ports.
        Some((0..count).map(move |step| low + ((start + step) % count) as u16))
    }
}

impl ProcessState {
    /// Returns the ports to try for a socket, starting with a random one. Returns `None` if the stack
    /// chooses.
    ///
    /// # Errors
    /// `ENETDOWN` if the stack is gone.
    pub(crate) fn local_ports(
        &mut self,
        file: FileId,
    ) -> Result<Option<impl Iterator<Item = u16> + use<>>, Errno> {
        let socket = self.files.socket(file)?;
        if !socket.options.has_port_range() {
            return Ok(None);
        }
        let is_udp = socket.is_udp;
        let ports = self.client.local_ports(is_udp).map_err(|_| Errno::NETDOWN)?;
        Ok(self.files.socket(file)?.options.ports_between(ports))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockaddr::Family;

    #[test]
    fn exactly_the_ports_of_the_range_are_tried() {
        let mut options = SocketOptionState::new(Family::V4, false);
        let ports = |options: &SocketOptionState| {
            let mut ports: Vec<u16> = options.ports_between((32_768, 60_999))?.collect();
            ports.sort_unstable();
            Some((ports[0], *ports.last()?, ports.len()))
        };
        for (low, high, tried) in [
            (0, 0, None),
            (40_000, 40_003, Some((40_000, 40_003, 4))),
            (0, 32_770, Some((32_768, 32_770, 3))),
            (60_990, 65_000, Some((60_990, 60_999, 10))),
            (1, 2, None),
        ] {
            options.port_range = low | high << 16;
            assert_eq!(ports(&options), tried, "{low} {high}");
        }
        assert_eq!(read(&[2, 0, 1, 0]), Err(Errno::INVAL));
        assert_eq!((read(&[1, 0]), read(&[1, 0, 2, 0])), (Err(Errno::INVAL), Ok(0x2_0001)));
    }
}
