//! Executes programs of classic BPF.

use super::socket::{SocketMachine, SocketPacket};
use super::{Instruction, MEMORY_WORDS, Operand, Operation, Program, Test};
use crate::flow::FlowShape;

/// Registers and memory. With `TRACKED`, each word also has the bits in which frames of the flow may differ.
struct Machine<'a, const TRACKED: bool> {
    frame: &'a [u8],
    /// The shape of the flow's headers, which says in which bits its frames may differ; `None` without
    /// `TRACKED`.
    shape: Option<FlowShape>,
    /// The headers and properties that programs of sockets can load besides the frame.
    socket: Option<SocketMachine<'a>>,
    a: Word,
    x: Word,
    memory: [Word; MEMORY_WORDS as usize],
    /// True if the result for other frames of the flow may differ.
    differs: bool,
}

#[derive(Clone, Copy, Default)]
struct Word {
    value: u32,
    differing: u32,
}

impl Word {
    fn constant(value: u32) -> Self {
        Self { value, differing: 0 }
    }
}

impl Program {
    /// Runs the program on a frame. Returns the program's result, which is not 0 if the program accepts the
    /// frame. The result is also 0 if the program loads beyond the frame's end or divides by 0.
    #[must_use]
    pub fn run(&self, frame: &[u8]) -> u32 {
        Machine::<false>::new(frame, None).run(&self.instructions).unwrap_or(0)
    }

    /// Runs the program of a socket on a packet. Returns the number of bytes to keep, of which 0 drops the
    /// packet, and an upper bound of the executed instructions plus the visited attributes. Jumps only lead
    /// forward, so the index after the last executed instruction is that bound for instructions.
    pub(super) fn run_on_socket(&self, packet: &SocketPacket<'_>) -> (u32, usize) {
        let mut machine = Machine::<false>::new(packet.bytes, None);
        machine.socket = Some(SocketMachine::new(packet));
        let mut next = 0;
        let kept = machine.run_from(&self.instructions, &mut next).unwrap_or(0);
        let visits = machine.socket.as_ref().map_or(0, SocketMachine::visits);
        (kept, next + visits)
    }

    /// Runs the program on a frame with headers of the shape `shape`. Returns `None` if the result for
    /// another frame of the flow may differ.
    ///
    /// The result depends only on the bits that the program examined on its path for this frame. If each bit
    /// that decided a branch or the result is equal in all frames of the flow, all of them take this path.
    pub(crate) fn run_for_flow(&self, frame: &[u8], shape: FlowShape) -> Option<u32> {
        let mut machine = Machine::<true>::new(frame, Some(shape));
        let value = machine.run(&self.instructions).unwrap_or(0);
        (!machine.differs).then_some(value)
    }
}

impl<'a, const TRACKED: bool> Machine<'a, TRACKED> {
    fn new(frame: &'a [u8], shape: Option<FlowShape>) -> Self {
        Self {
            frame,
            shape,
            socket: None,
            a: Word::default(),
            x: Word::default(),
            memory: [Word::default(); MEMORY_WORDS as usize],
            differs: false,
        }
    }

    /// Returns the program's result; `None` if it loads beyond the end of the frame or divides by 0.
    #[inline]
    fn run(&mut self, instructions: &[Instruction]) -> Option<u32> {
        self.run_from(instructions, &mut 0)
    }

    /// As [`Machine::run`], but begins at the instruction with the index `next`. Sets `next` to the index
    /// after the last executed instruction.
    #[inline(always)]
    fn run_from(&mut self, instructions: &[Instruction], next: &mut usize) -> Option<u32> {
        loop {
            let instruction = instructions.get(*next)?;
            *next += 1;
            match *instruction {
                Instruction::Load { size, indexed, at } => {
                    let base = if indexed { self.x } else { Word::default() };
                    self.a = self.load(base, at, size)?;
                }
                Instruction::LoadConstant(k) => self.a = Word::constant(k),
                Instruction::LoadMemory(k) => self.a = *self.memory.get(usize::from(k))?,
                Instruction::LoadLength => self.a = self.length(),
                Instruction::LoadProperty(property) => {
                    let (a, x) = (self.a.value, self.x.value);
                    self.a = Word::constant(self.socket.as_mut()?.property(property, a, x)?);
                }
                Instruction::LoadXConstant(k) => self.x = Word::constant(k),
                Instruction::LoadXMemory(k) => self.x = *self.memory.get(usize::from(k))?,
                Instruction::LoadXLength => self.x = self.length(),
                Instruction::LoadXHeaderLength(at) => {
                    let Word { value, differing } = self.load(Word::default(), at, 1)?;
                    self.x = Word { value: (value & 0xf) << 2, differing: (differing & 0xf) << 2 };
                }
                Instruction::Store(k) => *self.memory.get_mut(usize::from(k))? = self.a,
                Instruction::StoreX(k) => *self.memory.get_mut(usize::from(k))? = self.x,
                Instruction::Compute(operation, operand) => self.a = self.compute(operation, operand)?,
                Instruction::Negate => {
                    self.a = Word { value: self.a.value.wrapping_neg(), differing: spread(self.a.differing) };
                }
                Instruction::Jump(skip) => *next += skip as usize,
                Instruction::Branch { test, operand, jt, jf } => {
                    *next += usize::from(if self.test(test, operand) { jt } else { jf });
                }
                Instruction::ReturnConstant(k) => return Some(k),
                Instruction::ReturnA => {
                    self.depend_on(self.a.differing);
                    return Some(self.a.value);
                }
                Instruction::AToX => self.x = self.a,
                Instruction::XToA => self.a = self.x,
            }
        }
    }

    /// Records that the result depends on the bits `differing`, in which frames of the flow may differ.
    #[inline]
    fn depend_on(&mut self, differing: u32) {
        if TRACKED {
            self.differs |= differing != 0;
        }
    }

    /// Loads `size` bytes at `base + at`. For the program of a socket, negative offsets load from the headers
    /// (`SKF_NET_OFF`, `SKF_LL_OFF`). Returns `None` if the bytes do not exist.
    #[inline]
    fn load(&mut self, base: Word, at: u32, size: u8) -> Option<Word> {
        let start = base.value as usize + at as usize;
        let end = start + usize::from(size);
        if TRACKED {
            self.depend_on(base.differing);
            // Another frame of the flow may end before `end`.
            self.differs |= self.shape.is_none_or(|shape| end > shape.common_len());
        }
        let Some(bytes) = self.frame.get(start..end) else {
            let offset = base.value.wrapping_add(at).cast_signed();
            return self.socket.as_ref()?.load(offset, size).map(Word::constant);
        };
        let value = bytes.iter().fold(0, |value, byte| value << 8 | u32::from(*byte));
        let differing = match self.shape {
            Some(shape) if TRACKED => {
                (start..end).fold(0, |bits, at| bits << 8 | u32::from(shape.differing_bits(at)))
            }
            _ => 0,
        };
        Some(Word { value, differing })
    }

    fn length(&self) -> Word {
        // A frame is far shorter than 4 GiB.
        Word { value: self.frame.len() as u32, differing: u32::MAX }
    }

    fn operand(&self, operand: Operand) -> Word {
        match operand {
            Operand::Constant(k) => Word::constant(k),
            Operand::X => self.x,
        }
    }

    /// Returns the result of an operation; `None` after a division by 0.
    #[inline]
    fn compute(&mut self, operation: Operation, operand: Operand) -> Option<Word> {
        let (a, b) = (self.a, self.operand(operand));
        let value = match operation {
            Operation::Add => a.value.wrapping_add(b.value),
            Operation::Subtract => a.value.wrapping_sub(b.value),
            Operation::Multiply => a.value.wrapping_mul(b.value),
            Operation::Divide | Operation::Modulo => {
                self.depend_on(b.differing);
                if operation == Operation::Divide {
                    a.value.checked_div(b.value)?
                } else {
                    a.value.checked_rem(b.value)?
                }
            }
            Operation::Or => a.value | b.value,
            Operation::And => a.value & b.value,
            Operation::Xor => a.value ^ b.value,
            // For a shift by X of 32 or more, Linux's machine uses the low five bits of X; the result of
            // libpcap's machine is 0.
            Operation::ShiftLeft if self.socket.is_some() => a.value.wrapping_shl(b.value),
            Operation::ShiftRight if self.socket.is_some() => a.value.wrapping_shr(b.value),
            Operation::ShiftLeft => a.value.checked_shl(b.value).unwrap_or(0),
            Operation::ShiftRight => a.value.checked_shr(b.value).unwrap_or(0),
        };
        let differing = match operation {
            _ if !TRACKED => 0,
            // What is masked out does not differ.
            Operation::And if b.differing == 0 => a.differing & b.value,
            Operation::Or if b.differing == 0 => a.differing & !b.value,
            Operation::ShiftLeft if b.differing == 0 => a.differing.checked_shl(b.value).unwrap_or(0),
            Operation::ShiftRight if b.differing == 0 => a.differing.checked_shr(b.value).unwrap_or(0),
            Operation::Xor => a.differing | b.differing,
            _ => spread(a.differing | b.differing),
        };
        Some(Word { value, differing })
    }

    #[inline]
    fn test(&mut self, test: Test, operand: Operand) -> bool {
        let (a, b) = (self.a, self.operand(operand));
        if TRACKED {
            let examined = if test == Test::BitsSet && b.differing == 0 { b.value } else { u32::MAX };
            self.depend_on(a.differing & examined | b.differing);
        }
        match test {
            Test::Equal => a.value == b.value,
            Test::Greater => a.value > b.value,
            Test::GreaterOrEqual => a.value >= b.value,
            Test::BitsSet => a.value & b.value != 0,
        }
    }
}

/// Returns the bits of a result that may differ if these bits of the operands do, for operations in which a
/// bit may change all others.
fn spread(differing: u32) -> u32 {
    if differing == 0 { 0 } else { u32::MAX }
}
