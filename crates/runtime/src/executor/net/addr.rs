//! Conversion to socket addresses.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::io;

/// A type that can be connected to or bound, such as `SocketAddr`, `"10.0.0.1:80"`, `("10.0.0.1", 80)` and
/// `(Ipv4Addr::LOCALHOST, 80)`. Host names are not resolved: that needs a resolver on the shard, because the
/// system's resolver blocks.
pub trait ToSocketAddr: sealed::Sealed {
    /// Returns the address.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput): the text is not an address with a port.
    fn to_socket_addr(&self) -> io::Result<SocketAddr>;
}

mod sealed {
    pub trait Sealed {}
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("\"{text}\" is not an address with a port, such as 10.0.0.1:80"),
    )
}

macro_rules! to_socket_addr {
    ($($of:ty: |$value:ident| $make:expr;)*) => {
        $(
            impl sealed::Sealed for $of {}

            impl ToSocketAddr for $of {
                fn to_socket_addr(&self) -> io::Result<SocketAddr> {
                    let $value = self;
                    $make
                }
            }
        )*
    };
}

to_socket_addr! {
    SocketAddr: |a| Ok(*a);
    SocketAddrV4: |a| Ok((*a).into());
    SocketAddrV6: |a| Ok((*a).into());
    (IpAddr, u16): |a| Ok((*a).into());
    (Ipv4Addr, u16): |a| Ok((*a).into());
    (Ipv6Addr, u16): |a| Ok((*a).into());
    (&str, u16): |a| a.0.parse::<IpAddr>().map(|ip| (ip, a.1).into()).map_err(|_| invalid(a.0));
    str: |a| a.parse().map_err(|_| invalid(a));
    String: |a| a.parse().map_err(|_| invalid(a));
}

impl<T: ToSocketAddr + ?Sized> sealed::Sealed for &T {}

impl<T: ToSocketAddr + ?Sized> ToSocketAddr for &T {
    fn to_socket_addr(&self) -> io::Result<SocketAddr> {
        (**self).to_socket_addr()
    }
}

#[cfg(test)]
mod tests {
    use super::ToSocketAddr;
    use core::net::Ipv4Addr;
    use std::io::ErrorKind;

    #[test]
    fn addresses_parse_and_host_names_are_refused() {
        let wanted = "10.0.0.1:80".parse().unwrap();
        assert_eq!("10.0.0.1:80".to_socket_addr().unwrap(), wanted);
        assert_eq!(String::from("10.0.0.1:80").to_socket_addr().unwrap(), wanted);
        assert_eq!(("10.0.0.1", 80).to_socket_addr().unwrap(), wanted);
        assert_eq!((Ipv4Addr::new(10, 0, 0, 1), 80).to_socket_addr().unwrap(), wanted);
        for bad in ["localhost:80", "10.0.0.1", ""] {
            assert_eq!(bad.to_socket_addr().unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
