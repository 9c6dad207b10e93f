//! The state of a stack that another process takes over, so that connections outlive an exchange of the
//! program.

use super::Stack;
use crate::ip::image::NetworkImage;
use crate::socket_filter::SocketFilter;
use crate::steering::MisroutedPacket;
use crate::tcp::image::{TcpImage, TcpRef};
use crate::tcp::source::{Source, SourceId};
use crate::udp::image::{UdpImage, UdpRef};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::sync::Arc;

/// Makes again what an image has no bytes of.
pub trait Restorer {
    /// Returns the filter, or the program of a group, whose [`SocketFilter::saved`] returned these bytes.
    fn filter(&mut self, saved: &[u8]) -> Option<Arc<dyn SocketFilter>> {
        let _ = saved;
        None
    }

    /// Returns the source with this id, whose [`Source::can_be_restored`] returned true. The id stays valid.
    fn source(&mut self, id: SourceId) -> Option<Box<dyn Source>> {
        let _ = id;
        None
    }
}

/// A [`Restorer`] for stacks without filters and sources.
#[derive(Clone, Copy, Debug)]
pub struct Nothing;

impl Restorer for Nothing {}

/// The state, to be written.
#[derive(Serialize)]
#[serde(rename = "Stack")]
struct StackRef<'a> {
    tcp: TcpRef<'a>,
    udp: UdpRef<'a>,
    network: NetworkImage,
    misrouted: &'a [MisroutedPacket],
}

/// The state as it is read, for [`Stack::restore_image`]. Its `Deserialize` describes the layout of what
/// [`Stack::save`] writes: a test that compares the layouts of two versions traces it.
#[derive(Deserialize)]
#[serde(rename = "Stack")]
pub struct StackImage {
    tcp: TcpImage,
    udp: UdpImage,
    network: NetworkImage,
    misrouted: Vec<MisroutedPacket>,
}

impl Stack {
    /// Returns why the stack cannot be saved now, in a sentence without a full stop: a burst or a class of
    /// events is being processed, or a [`Source`] is in use that cannot be made again.
    pub fn cannot_be_saved(&self) -> Option<&'static str> {
        self.tcp.cannot_be_saved().or_else(|| self.udp.cannot_be_saved())
    }

    /// Writes the state of TCP and UDP: connections with their bytes, listeners, sockets, timers, events that
    /// were not taken, keys and counters. Of the network layer it writes what was learnt: neighbours, path
    /// MTUs, and IPv6 addresses and routes that routers advertise. The configuration, devices and links are
    /// not written. The stack does not change. All times are written as they are, so the reader needs the
    /// same clock.
    ///
    /// [`Stack::cannot_be_saved`] must return `None`.
    ///
    /// # Errors
    /// The serializer's.
    pub fn save<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { net, tcp, udp, misrouted } = self;
        StackRef { tcp: tcp.image(), udp: udp.image(), network: net.image(), misrouted }.serialize(to)
    }

    /// Takes over the state that another stack has [written](Stack::save). This stack has its devices, links,
    /// routes and steering, and was not used before. Handles stay valid. Connections look up their routes
    /// again when they send next, and groups are joined again. Keys are those of the image, except for a fast
    /// open key of the configuration.
    ///
    /// A damaged image is an error. Indices and lengths are checked, and so is that lists and connections
    /// agree, but not every number of a connection: a damaged one that seems valid may misbehave later. So an
    /// image must come from where it was written, and its owner should protect it with a checksum.
    ///
    /// # Errors
    /// In a sentence without a full stop: the configuration has too little room for the state, `owner` does
    /// not make something again, or the image is malformed. The stack must not be used afterwards.
    pub fn restore_image(&mut self, image: StackImage, owner: &mut dyn Restorer) -> Result<(), String> {
        let StackImage { tcp, udp, network, misrouted } = image;
        self.tcp.restore(tcp, owner)?;
        self.udp.restore(udp, &mut self.net, owner)?;
        self.net.restore(network);
        self.misrouted = misrouted;
        Ok(())
    }

    /// Reads an image and takes it over, as [`Stack::restore_image`] does.
    ///
    /// # Errors
    /// The deserializer's, which may have no sentences.
    pub fn restore<'de, D: Deserializer<'de>>(
        &mut self,
        from: D,
        owner: &mut dyn Restorer,
    ) -> Result<(), D::Error> {
        let image = StackImage::deserialize(from)?;
        self.restore_image(image, owner).map_err(D::Error::custom)
    }
}
