//! Workers behind the application's place (docs/adr/0015-workers.md): in that place stands the stack's end of a channel instead of the application,
//! the *front*, and each worker is a client of it, with a shard and an application of its own.

use super::Part;
use crate::builder::Place;
use crate::channel::control::SameThread;
use crate::channel::{ChannelConfig, ChannelServer, Client};
use crate::config::Config;
use crate::error::Error;
use crate::handler::Handler;
use crate::placement::{Beside, Role};
use crate::presence::Presence;
use crate::shard::Shard;
use ginnel_stack::time::Instant;
use std::sync::{Arc, Mutex};

/// What one worker is made of but its handler and its end of the channel.
pub(super) struct Worker {
    config: Config,
    seed: [u8; 32],
    now: Option<Instant>,
    place: Place,
    presence: Option<(Arc<Presence>, String)>,
}

impl Worker {
    /// `front` is what it watches, or takes along.
    pub fn build<H: Handler>(
        self,
        client: Client,
        handler: H,
        front: Option<Beside>,
    ) -> Result<Shard<H>, Error> {
        let mut builder = Shard::builder(self.config).handler(handler).seed(self.seed).channel(client);
        if let Some(now) = self.now {
            builder = builder.now(now);
        }
        if let Some(front) = front {
            builder = builder.beside(front);
        }
        if let Some((presence, label)) = self.presence {
            builder = builder.presence(Some(presence), label);
        }
        builder.place(self.place).build_placed()
    }
}

/// A shard with a front in the place of its application, and the parts of its workers.
pub(super) fn front(mut part: Part) -> Result<(Shard<ChannelServer>, Vec<Worker>), Error> {
    let Part { config, seed, now, index, .. } = &part;
    let channel = ChannelConfig { clients_max: config.shard.workers, ..config.channel.clone() };
    let (config, seed, now, shard) = (config.clone(), *seed, *now, *index);
    let presence = part.presence.clone();
    let worker = |(number, way)| {
        let place = Place { role: Role::Worker(number), shard, way: Some(way) };
        let presence = presence.clone().map(|(presence, label)| (presence, format!("{label}.w{number}")));
        Worker { config: config.clone(), seed, now, place, presence }
    };
    let workers = (0..).zip(core::mem::take(&mut part.ways)).map(worker).collect();
    Ok((part.build(ChannelServer::for_workers(&channel)?)?, workers))
}

/// The shards of the workers of one shard, to be turned by the caller: the first takes the front along.
pub(super) fn build<H: Handler>(
    part: Part,
    shards: &mut Vec<Shard<H>>,
    handler: &mut impl FnMut(usize) -> Result<H, Error>,
) -> Result<(), Error> {
    let (front, workers) = front(part)?;
    let front = SameThread(Arc::new(Mutex::new(front)));
    for (number, worker) in workers.into_iter().enumerate() {
        let along = (number == 0).then(|| Beside::new(front.clone()));
        let handler = handler(shards.len())?;
        shards.push(worker.build(front.attach()?, handler, along)?);
    }
    Ok(())
}
