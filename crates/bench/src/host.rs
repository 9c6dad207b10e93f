//! A stack with a device, driven turn by turn.

use core::net::{IpAddr, Ipv4Addr};
use ginnel_stack::device::{Device, RxBurst, RxQueue};
use ginnel_stack::events::Event;
use ginnel_stack::handle::PortId;
use ginnel_stack::ip::RouteConfig;
use ginnel_stack::link::LinkConfig;
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::tcp::config::TcpConfig;
use ginnel_stack::time::Instant;

/// A stack with a device.
pub struct StackHost {
    /// The stack.
    pub stack: Stack,
    port: PortId,
    rx: Box<dyn RxQueue + Send>,
}

/// An application that handles events directly.
pub trait Application {
    /// Handles an event. Received data are still in `burst`.
    fn on_event(&mut self, stack: &mut Stack, event: Event, burst: &RxBurst<'_>);
}

impl StackHost {
    /// Creates a host with an address in a /24 network, and optionally a router for all other destinations.
    pub fn new(
        device: Device,
        address: Ipv4Addr,
        router: Option<Ipv4Addr>,
        tcp: TcpConfig,
        now: Instant,
    ) -> Self {
        let config = StackConfig { tcp, ..StackConfig::default() };
        let mut stack = Stack::new(config, [7; 32], now).expect("the configuration of a bench is valid");
        ginnel::table_memory::advise(&stack);
        let port = stack.add_port(device.tx);
        let addresses = vec![(IpAddr::V4(address), 24)];
        let link = LinkConfig { name: "bench".into(), addresses, ..LinkConfig::default() };
        let link = stack.add_link(port, &link).expect("the link of a bench is valid");
        if let Some(router) = router {
            let destination = Ipv4Addr::UNSPECIFIED.into();
            let route = RouteConfig { destination, prefix: 0, gateway: Some(router.into()), link, metric: 0 };
            stack.add_route(route).expect("the router is on the link");
        }
        Self { stack, port, rx: device.rx }
    }

    /// Receives a burst, lets the application handle the events, runs timers, and sends. Returns the number
    /// of received frames.
    #[inline]
    pub fn turn(&mut self, now: Instant, application: &mut impl Application) -> usize {
        let Self { stack, port, rx } = self;
        let mut burst = RxBurst::new();
        rx.rx_burst(now, &mut burst);
        if !burst.is_empty() {
            stack.receive(now, *port, &burst);
            while let Some(event) = stack.next_event() {
                application.on_event(stack, event, &burst);
            }
            stack.finish_burst(&burst);
        }
        stack.advance(now);
        while let Some(event) = stack.next_event() {
            application.on_event(stack, event, &RxBurst::new());
        }
        stack.transmit(now);
        burst.len()
    }

    /// Returns when the next turn is due if no frame arrives before.
    pub fn next_deadline(&self) -> Option<Instant> {
        [self.stack.next_deadline(), self.rx.next_deadline()].into_iter().flatten().min()
    }
}
