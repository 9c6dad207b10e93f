use super::*;

fn pool() -> ChunkPool {
    ChunkPool::new(1 << 20)
}

fn read_all(buffer: &mut RecvBuffer, pool: &mut ChunkPool) -> Vec<u8> {
    let mut out = vec![0; buffer.readable()];
    assert_eq!(buffer.read(pool, &mut out), out.len());
    out
}

#[test]
fn bytes_behind_a_gap_become_readable_when_it_closes() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    let late = buffer.write(&mut pool, 3, b"defg", 100);
    assert_eq!(late, WriteOutcome { accepted: 4, stored: 4, newly_contiguous: 0, duplicate: None });
    assert_eq!((buffer.readable(), buffer.ranges().as_slice()), (0, &[(3, 7)][..]));
    let closing = buffer.write(&mut pool, 0, b"abcXY", 100);
    assert_eq!(
        closing,
        WriteOutcome { accepted: 5, stored: 3, newly_contiguous: 7, duplicate: Some((3, 5)) }
    );
    assert_eq!(read_all(&mut buffer, &mut pool), b"abcdefg");
    assert!(buffer.is_empty());
    assert_eq!(pool.in_use(), 0);
}
