//! UDP sockets of clients: each datagram is a question and an answer.

use super::*;

impl ChannelServer {
    pub(super) fn serve_udp(&mut self, cx: &mut Context<'_>, client: usize, asked: UdpRequest) -> Reply {
        let known = |server: &Self, socket: UdpHandle| {
            let known = server.sockets.get(socket.index() as usize)?;
            let held = known.holders & 1 << client != 0 && known.generation == socket.generation();
            known.udp.filter(|_| held)
        };
        let to = |server: &Self, socket| known(server, socket).ok_or(UdpError::Stale);
        match asked {
            UdpRequest::Bind(local, options) => {
                let Some(socket) = self.free.last().copied() else {
                    return Reply::UdpBind(Err(UdpError::TooMany));
                };
                Reply::UdpBind(cx.udp_bind(local, options).map(|udp| {
                    self.free.pop();
                    let generation = self.socket(socket).generation;
                    let (bits, holders) = (state::UDP, 1 << client);
                    self.udp.insert(udp, (socket, VecDeque::new()));
                    let udp = Some(udp);
                    *self.socket(socket) =
                        Socket { in_use: true, generation, holders, bits, udp, ..Socket::default() };
                    self.region.socket(socket).begin(generation);
                    self.region.socket(socket).state.store(bits, Ordering::Release);
                    (socket, generation)
                }))
            }
            UdpRequest::Connect(socket, remote) => {
                Reply::Udp(to(self, socket).and_then(|udp| cx.udp_connect(udp, remote)))
            }
            UdpRequest::Send(socket, remote, data) => {
                Reply::Udp(to(self, socket).and_then(|udp| cx.udp_send(udp, remote, &data)))
            }
            UdpRequest::Reply(socket, datagram, data) => {
                Reply::Udp(to(self, socket).and_then(|udp| cx.udp_reply(udp, &datagram, &data)))
            }
            UdpRequest::Recv(socket) => Reply::UdpRecv(to(self, socket).and_then(|udp| {
                let waiting = self.udp.get_mut(&udp).and_then(|(_, waiting)| waiting.pop_front());
                waiting.unwrap_or(Err(UdpError::WouldBlock))
            })),
            UdpRequest::Local(socket) => Reply::UdpLocal(to(self, socket).and_then(|udp| cx.udp_local(udp))),
            // The client releases its number afterwards.
            UdpRequest::Close(socket) => Reply::Udp(to(self, socket).and_then(|udp| {
                self.socket(socket.index()).udp = None;
                self.udp.remove(&udp);
                cx.udp_close(udp)
            })),
        }
    }

    /// A datagram or an error came.
    pub(super) fn came(&mut self, udp: UdpHandle, what: Result<(Datagram, Vec<u8>), UdpError>) {
        let Some((socket, waiting)) = self.udp.get_mut(&udp) else { return };
        if waiting.len() == DATAGRAMS_MAX {
            self.stats.datagrams_dropped += 1;
            return;
        }
        waiting.push_back(what);
        let socket = *socket;
        self.notice(socket);
    }
}
