use super::*;
use core::net::Ipv6Addr;

/// Returns a packet with these extension headers and 16 bytes after them.
fn packet(first: u8, extensions: &[&[u8]]) -> Vec<u8> {
    let body = extensions.concat();
    let header = ipv6::Header {
        dscp: 0,
        ecn: 0,
        flow_label: 0,
        payload_len: body.len() as u16 + 16,
        next_header: first,
        hop_limit: 64,
        src: Ipv6Addr::LOCALHOST,
        dst: Ipv6Addr::LOCALHOST,
    };
    let mut packet = vec![0; 40];
    header.emit(&mut packet);
    packet.extend(body);
    packet.extend([0xdd; 16]);
    packet
}

fn follow(packet: &[u8]) -> Result<HeaderChain, HeaderChainError> {
    walk_header_chain(packet, &ipv6::Header::parse(packet).unwrap())
}

fn drops(error: WireError) -> Result<HeaderChain, HeaderChainError> {
    Err(HeaderChainError::Drop(error))
}

const TCP_ONLY: HeaderChain =
    HeaderChain { protocol: 6, offset: 40, next_header_offset: 6, fragment: None, router_alert: None };

#[test]
fn transport_without_extensions_is_found_at_40() {
    assert_eq!(follow(&packet(6, &[])), Ok(TCP_ONLY));
    assert_eq!(follow(&packet(59, &[])), Ok(HeaderChain { protocol: 59, ..TCP_ONLY }));
}

#[test]
fn chain_of_known_headers_is_followed() {
    let mut alert = [0; 8];
    emit_router_alert(protocol::DESTINATION_OPTIONS, &mut alert);
    let options = [43, 1, 1, 4, 0, 0, 0, 0, 0x1e, 4, 9, 9, 9, 9, 0, 0];
    let routing = [6, 0, 4, 0, 0, 0, 0, 0];
    let packet = packet(0, &[&alert, &options, &routing]);
    let expected = HeaderChain { offset: 72, next_header_offset: 64, router_alert: Some(0), ..TCP_ONLY };
    assert_eq!(follow(&packet), Ok(expected));
}

#[test]
fn atomic_fragment_does_not_end_the_chain() {
    let mut fragment = [0; 8];
    let header = FragmentHeader { next_header: 17, offset: 1448, more_fragments: true, ident: 0xdead_beef };
    header.emit(&mut fragment);
    assert_eq!(FragmentHeader::parse(&fragment), Ok(header));
    let found = FragmentLocation { header, header_offset: 40, next_header_offset: 6 };
    let expected = HeaderChain {
        protocol: 17,
        offset: 48,
        next_header_offset: 40,
        fragment: Some(found),
        router_alert: None,
    };
    assert_eq!(follow(&packet(44, &[&fragment])), Ok(expected));

    FragmentHeader { offset: 0, more_fragments: false, next_header: 6, ..header }.emit(&mut fragment);
    let expected = HeaderChain { offset: 48, next_header_offset: 40, ..TCP_ONLY };
    assert_eq!(follow(&packet(44, &[&fragment])), Ok(expected));
}

#[test]
fn impossible_fragments_are_reported() {
    let mut fragment = [0; 8];
    let header = FragmentHeader { next_header: 17, offset: 65_528, more_fragments: false, ident: 1 };
    header.emit(&mut fragment);
    let expected = HeaderChainError::ParameterProblem { code: 0, pointer: 42, even_if_multicast: false };
    assert_eq!(follow(&packet(44, &[&fragment])), Err(expected));

    FragmentHeader { offset: 0, more_fragments: true, ..header }.emit(&mut fragment);
    let mut odd = packet(44, &[&fragment]);
    odd.pop();
    odd[5] -= 1;
    let expected = HeaderChainError::ParameterProblem { code: 0, pointer: 4, even_if_multicast: false };
    assert_eq!(follow(&odd), Err(expected));
}

#[test]
fn hop_by_hop_may_only_come_first() {
    let options = [0, 0, 1, 4, 0, 0, 0, 0];
    let expected = HeaderChainError::ParameterProblem { code: 1, pointer: 40, even_if_multicast: false };
    assert_eq!(follow(&packet(60, &[&options, &options])), Err(expected));
}

#[test]
fn route_with_hops_left_is_reported() {
    let routing = [6, 0, 0, 1, 0, 0, 0, 0];
    let expected = HeaderChainError::ParameterProblem { code: 0, pointer: 42, even_if_multicast: false };
    assert_eq!(follow(&packet(43, &[&routing])), Err(expected));
}

#[test]
fn unknown_option_does_what_its_type_says() {
    let with = |kind: u8| follow(&packet(60, &[&[6, 0, kind, 4, 0, 0, 0, 0]])).map(|chain| chain.offset);
    let report = |even_if_multicast| {
        Err(HeaderChainError::ParameterProblem { code: 2, pointer: 42, even_if_multicast })
    };
    assert_eq!(with(0x1e), Ok(48));
    assert_eq!(with(0x5e), Err(HeaderChainError::Drop(WireError::Unsupported)));
    assert_eq!(with(0x9e), report(true));
    assert_eq!(with(0xde), report(false));
}

#[test]
fn options_that_overrun_their_header_are_dropped() {
    assert_eq!(follow(&packet(60, &[&[6, 0, 0x1e, 5, 0, 0, 0, 0]])), drops(WireError::BadLength));
    assert_eq!(follow(&packet(60, &[&[6, 0, 1, 3, 0, 0, 0, 0x1e]])), drops(WireError::BadLength));
}

#[test]
fn padding_and_options_without_end_are_dropped() {
    assert_eq!(follow(&packet(60, &[&[6, 0, 0, 0, 0, 0, 0, 0]])).map(|c| c.protocol), Ok(6));
    let pads = [6, 1, 1, 6, 0, 0, 0, 0, 0, 0, 0x1e, 2, 0, 0, 0, 0];
    assert_eq!(follow(&packet(60, &[&pads])), drops(WireError::Unsupported));
    let mut many = vec![0; 24];
    many[..2].copy_from_slice(&[6, 2]);
    for option in many[2..].chunks_exact_mut(2) {
        option.copy_from_slice(&[0x1e, 0]);
    }
    assert_eq!(follow(&packet(60, &[&many])), drops(WireError::Unsupported));
}

#[test]
fn endless_chain_is_dropped() {
    let options: &[u8] = &[60, 0, 1, 4, 0, 0, 0, 0];
    let last: &[u8] = &[6, 0, 1, 4, 0, 0, 0, 0];
    let chain = |n: usize| {
        let mut headers = vec![options; n - 1];
        headers.push(last);
        follow(&packet(60, &headers)).map(|chain| chain.offset)
    };
    assert_eq!(chain(EXTENSION_HEADERS_MAX), Ok(40 + 8 * EXTENSION_HEADERS_MAX));
    assert_eq!(chain(EXTENSION_HEADERS_MAX + 1), Err(HeaderChainError::Drop(WireError::Unsupported)));
}

#[test]
fn chain_beyond_the_packet_is_dropped() {
    let mut short = packet(60, &[&[6, 0, 1, 4, 0, 0, 0, 0]]);
    short[41] = 9;
    assert_eq!(follow(&short), drops(WireError::Truncated));
    // The buffer continues, but the payload length ends the packet.
    let mut short = packet(60, &[&[6, 0, 1, 4, 0, 0, 0, 0]]);
    short[5] = 4;
    assert_eq!(follow(&short), drops(WireError::Truncated));
}
