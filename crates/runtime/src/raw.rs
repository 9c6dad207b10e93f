//! Devices without an engine, for programs with a TCP of their own, such as a load generator. They get the
//! device as a shard would, with all its layers, and sleep as a shard does.

use crate::config::{Config, DeviceConfig};
use crate::error::Error;
use crate::shard::POLL_INTERVAL;
use crate::stop::StopFlag;
use crate::{clock, devices, pin, wait};
use ginnel_stack::device::{Device, RxQueue};
use ginnel_stack::time::Instant;

/// Opens the device, or takes the supplied one (a memory device has to be supplied), and adds the configured
/// layers. `full_config` is the configuration that contains `config`; its links describe the stack.
///
/// # Errors
/// Returns an error if the device cannot be opened, or the capture file cannot be written.
pub fn open(config: &DeviceConfig, full_config: &Config, supplied: Option<Device>) -> Result<Device, Error> {
    let device = match supplied {
        Some(device) => device,
        None => devices::open(config, full_config)?,
    };
    devices::wrap(device, config)
}

/// Pins the calling thread to one of the CPUs that the process may use.
///
/// # Errors
/// Returns an error if the process may not use this CPU.
pub fn pin(cpu: u32) -> Result<(), Error> {
    pin::pin("shard.cpu", cpu)
}

/// Sleeps in the kernel until a frame arrives, the time is `until`, or `stop` is set. Returns at once if
/// frames are waiting.
///
/// # Errors
/// Returns the error of a failed system call.
pub fn sleep(rx: &mut dyn RxQueue, stop: &StopFlag, until: Instant) -> Result<(), Error> {
    if !rx.arm() {
        return Ok(());
    }
    let now = clock::now();
    let fd = rx.wake_fd();
    let until = if fd.is_none() { until.min(now + POLL_INTERVAL) } else { until };
    if until <= now || stop.is_set() {
        return Ok(());
    }
    let stop = stop.wake().as_fd();
    wait::sleep([stop, stop], fd.as_slice(), Some(until - now)).map_err(|e| Error::io("sleep", e))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{open, sleep};
    use crate::clock;
    use crate::config::{Config, DeviceConfig, DeviceKind};
    use crate::stop::StopFlag;
    use core::time::Duration;
    use ginnel_devices::memory::{MemoryConfig, pair};
    use ginnel_stack::device::{RxBurst, TxMeta};

    #[test]
    fn frame_deadline_and_stop_flag_end_a_sleep() {
        let (mut peer, near) = pair(MemoryConfig::default());
        let (config, full_config) = (DeviceConfig::new("cable", DeviceKind::Memory), Config::default());
        assert!(open(&config, &full_config, None).is_err(), "a memory device has to be supplied");
        let mut near = open(&config, &full_config, Some(near)).unwrap();
        let stop = StopFlag::new().unwrap();
        let (hour, start) = (Duration::from_secs(3600), clock::now());

        sleep(&mut *near.rx, &stop, start + Duration::from_millis(5)).unwrap();
        assert!(clock::now() - start >= Duration::from_millis(5));

        let sender = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            peer.tx.reserve(60).unwrap().fill(0);
            peer.tx.commit(60, TxMeta::default());
            peer.tx.flush(clock::now());
            peer
        });
        // A sleep may end early; the frame has to end it eventually.
        loop {
            sleep(&mut *near.rx, &stop, start + hour).unwrap();
            let mut burst = RxBurst::new();
            near.rx.rx_burst(clock::now(), &mut burst);
            if !burst.is_empty() {
                break;
            }
        }
        let _far = sender.join().unwrap();
        stop.stop();
        sleep(&mut *near.rx, &stop, start + hour).unwrap();
        assert!(clock::now() < start + hour);
    }
}
