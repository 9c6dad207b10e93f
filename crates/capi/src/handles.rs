//! Handles as C has them: structures of one number, so that the compiler tells them apart. 0 is no handle.

use crate::failure::{Failure, STALE};
use ginnel::{Conn, Listener, UdpHandle};

/// Converts an index and a generation to the number of a handle.
fn number(index: u32, generation: u32) -> u64 {
    // An index is less than 2^32 - 1, because tables are smaller.
    u64::from(generation) << 32 | u64::from(index.wrapping_add(1))
}

fn parts(number: u64) -> Result<(u32, u32), Failure> {
    let index = (number as u32).checked_sub(1).ok_or(STALE)?;
    Ok((index, (number >> 32) as u32))
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident of $rust:ident;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(C)]
        pub struct $name {
            pub id: u64,
        }

        impl From<$rust> for $name {
            fn from(handle: $rust) -> Self {
                Self { id: number(handle.index(), handle.generation()) }
            }
        }

        impl $name {
            /// Returns the engine's handle. A number that was never a handle becomes a stale handle.
            ///
            /// # Errors
            /// `EBADF` for 0.
            pub fn get(self) -> Result<$rust, Failure> {
                let (index, generation) = parts(self.id)?;
                Ok($rust::new(index, generation))
            }
        })*
    };
}

handles! {
    /// `struct ginnel_conn`.
    ConnHandle of Conn;
    /// `struct ginnel_listener`.
    ListenerHandle of Listener;
    /// `struct ginnel_udp`.
    UdpSocketHandle of UdpHandle;
}

/// `struct ginnel_timer`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TimerHandle {
    pub id: u64,
}

/// `struct ginnel_fd`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelFdHandle {
    pub id: u64,
}

/// `struct ginnel_source`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SourceHandle {
    pub id: u64,
}
