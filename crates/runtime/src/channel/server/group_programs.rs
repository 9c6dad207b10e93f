//! Programs that select the member of a group of sockets which share an address (`SO_ATTACH_REUSEPORT_CBPF`).

use super::domain::Domain;
use super::filters::Target;
use crate::channel::control::SocketId;
use crate::context::Context;
use crate::socket_filter::{FilterError, SelectingProgram};
use ginnel_stack::error::GroupError;
use ginnel_stack::socket_filter::SocketFilter;
use std::sync::Arc;

impl Domain {
    /// Sets the program of the group of a socket; `None` removes it. With `is_first` the socket must be the
    /// only member.
    ///
    /// # Errors
    /// The client does not own the socket, or the program is not valid or finds no memory. The inner error is
    /// that of the engine.
    pub(super) fn set_group_program(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        of: SocketId,
        code: Option<&[u8]>,
        is_first: bool,
    ) -> Result<Result<(), GroupError>, FilterError> {
        let target = self.target(client, of).ok_or(FilterError::Stale)?;
        let program = match code.map(|code| SelectingProgram::new(code, &self.filter_budget)).transpose() {
            Ok(program) => program.map(|program| Arc::new(program) as Arc<dyn SocketFilter>),
            Err(error) => {
                self.stats.filters_refused += u64::from(error == FilterError::NoMemory);
                return Err(error);
            }
        };
        Ok(match target {
            Target::Conn(_) => Err(GroupError::NotInGroup),
            Target::Udp(socket) => cx.udp_set_group_program(socket, program, is_first),
            Target::Listener(listener) => cx.set_group_program(listener, program, is_first),
        })
    }
}
