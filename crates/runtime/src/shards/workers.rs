//! Workers (docs/adr/0015-workers.md): the application of a shard is replaced by a *hub*, the stack's end of
//! a channel. Each worker is a client of the hub, with a shard and an application of its own.

use super::ShardPart;
use crate::builder::ThreadPosition;
use crate::channel::control::SameThread;
use crate::channel::{ChannelConfig, ChannelServer, Client};
use crate::config::Config;
use crate::error::Error;
use crate::handler::Handler;
use crate::placement::{CoShard, Role};
use crate::published_stack::PublishedStack;
use crate::shard::Shard;
use ginnel_stack::time::Instant;
use std::sync::{Arc, Mutex};

/// Everything that a worker is built from except its handler and its end of the channel.
pub(super) struct WorkerPart {
    config: Config,
    seed: [u8; 32],
    now: Option<Instant>,
    placement: ThreadPosition,
    published: Option<(Arc<PublishedStack>, String)>,
}

impl WorkerPart {
    /// Builds the shard of the worker. `hub` is the shard that the worker watches or drives.
    pub fn build<H: Handler>(
        self,
        client: Client,
        handler: H,
        hub: Option<CoShard>,
    ) -> Result<Shard<H>, Error> {
        let mut builder = Shard::builder(self.config).handler(handler).seed(self.seed).channel(client);
        if let Some(now) = self.now {
            builder = builder.now(now);
        }
        if let Some(hub) = hub {
            builder = builder.co_shard(hub);
        }
        if let Some((stack, label)) = self.published {
            builder = builder.published(Some(stack), label);
        }
        builder.position(self.placement).build_with_placement()
    }
}

/// Builds a shard with a hub as its application, and the parts of its workers.
pub(super) fn build_hub(mut part: ShardPart) -> Result<(Shard<ChannelServer>, Vec<WorkerPart>), Error> {
    let ShardPart { config, seed, now, index, .. } = &part;
    let channel = ChannelConfig { clients_max: config.shard.workers, ..config.channel.clone() };
    let (mut config, seed, now, shard) = (config.clone(), *seed, *now, *index);
    // The workers' shards have no function, so this tells them whether priorities are in use.
    config.priority.enabled = Some(config.priority.is_enabled(part.priority_functions.is_some()));
    let published = part.published.clone();
    let worker = |(number, mailbox)| {
        let placement = ThreadPosition { role: Role::Worker(number), shard, commands: Some(mailbox) };
        let published = published.clone().map(|(stack, label)| (stack, format!("{label}.w{number}")));
        WorkerPart { config: config.clone(), seed, now, placement, published }
    };
    let workers = (0..).zip(core::mem::take(&mut part.app_mailboxes)).map(worker).collect();
    Ok((part.build(ChannelServer::for_workers(&channel)?)?, workers))
}

/// Builds the shards of the workers of one shard, for the caller to drive: the first worker drives the hub,
/// too.
pub(super) fn build_workers<H: Handler>(
    part: ShardPart,
    shards: &mut Vec<Shard<H>>,
    handler: &mut impl FnMut(usize) -> Result<H, Error>,
) -> Result<(), Error> {
    let (hub, workers) = build_hub(part)?;
    let hub = SameThread(Arc::new(Mutex::new(hub)));
    for (number, worker) in workers.into_iter().enumerate() {
        let co_shard = (number == 0).then(|| CoShard::new(hub.clone()));
        let handler = handler(shards.len())?;
        shards.push(worker.build(hub.attach()?, handler, co_shard)?);
    }
    Ok(())
}
