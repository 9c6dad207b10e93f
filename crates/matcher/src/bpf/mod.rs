//! Programs of the classic BPF machine (bpf(4)), to which libpcap compiles expressions, and which programs
//! attach to sockets (`SO_ATTACH_FILTER`).

mod run;
mod socket;

pub use socket::{SocketPacket, SocketProgram};

use core::fmt;

/// Longest program, in instructions (`BPF_MAXINSNS`).
const INSTRUCTIONS_MAX: usize = 4096;
/// Words of scratch memory (`BPF_MEMWORDS`).
const MEMORY_WORDS: u32 = 16;

/// An instruction as libpcap encodes it (`struct bpf_insn`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RawInstruction {
    /// Operation.
    pub code: u16,
    /// Instructions that are skipped if a condition is true.
    pub jt: u8,
    /// Instructions that are skipped if it is false.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

/// A program whose instructions are valid: it ends after at most as many steps as it has instructions, and
/// accesses nothing but the frame and its own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    instructions: Box<[Instruction]>,
}

/// Why a program cannot be executed. Instructions are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadProgram {
    /// The program has no instruction.
    Empty,
    /// The program has this number of instructions, which is too large.
    TooLong(usize),
    /// The last instruction does not return.
    NoReturn,
    /// The instruction with this index has an unknown operation code.
    UnknownOperation(usize, u16),
    /// The instruction with this index jumps past the end of the program.
    WildJump(usize),
    /// The instruction with this index accesses a word of memory that does not exist.
    WildMemory(usize),
    /// The instruction with this index divides by the constant 0.
    DivisionByZero(usize),
    /// The instruction with this index shifts by a constant of 32 or more.
    WildShift(usize),
    /// The instruction with this index loads an unknown property of a packet (`SKF_AD_OFF`).
    UnknownProperty(usize),
    /// The instruction with this index may read a word of memory that was not written.
    UnwrittenMemory(usize),
}

impl fmt::Display for BadProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("no instructions"),
            Self::TooLong(len) => write!(f, "{len} instructions, at most {INSTRUCTIONS_MAX} are possible"),
            Self::NoReturn => f.write_str("the last instruction is no return"),
            Self::UnknownOperation(at, code) => write!(f, "instruction {at} has the unknown code {code:#x}"),
            Self::WildJump(at) => write!(f, "instruction {at} jumps behind the end"),
            Self::WildMemory(at) => write!(f, "instruction {at} accesses memory behind the end"),
            Self::DivisionByZero(at) => write!(f, "instruction {at} divides by 0"),
            Self::WildShift(at) => write!(f, "instruction {at} shifts by more than 31 bits"),
            Self::UnknownProperty(at) => write!(f, "instruction {at} loads an unknown property"),
            Self::UnwrittenMemory(at) => write!(f, "instruction {at} may read memory that was not written"),
        }
    }
}

impl std::error::Error for BadProgram {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instruction {
    /// A = bytes of the frame, big-endian, at `at`, to which X is added if `indexed`.
    Load {
        size: u8,
        indexed: bool,
        at: u32,
    },
    LoadConstant(u32),
    LoadMemory(u8),
    LoadLength,
    /// A = a property of a packet of a socket.
    LoadProperty(socket::Property),
    LoadXConstant(u32),
    LoadXMemory(u8),
    LoadXLength,
    /// X = 4 * the low half of the byte at this offset: the length of an IPv4 header.
    LoadXHeaderLength(u32),
    Store(u8),
    StoreX(u8),
    Compute(Operation, Operand),
    Negate,
    /// Skips instructions.
    Jump(u32),
    /// Skips `jt` instructions if the test is true, otherwise `jf`.
    Branch {
        test: Test,
        operand: Operand,
        jt: u8,
        jf: u8,
    },
    ReturnConstant(u32),
    ReturnA,
    AToX,
    XToA,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Add,
    Subtract,
    Multiply,
    Divide,
    Modulo,
    Or,
    And,
    Xor,
    ShiftLeft,
    ShiftRight,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    Equal,
    Greater,
    GreaterOrEqual,
    /// A AND operand is not 0.
    BitsSet,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operand {
    Constant(u32),
    X,
}

// Classes, the low three bits of an operation code.
const LD: u16 = 0;
const LDX: u16 = 1;
const ST: u16 = 2;
const STX: u16 = 3;
const ALU: u16 = 4;
const JMP: u16 = 5;
const RET: u16 = 6;

impl Program {
    /// Verifies a program.
    ///
    /// # Errors
    /// The first instruction that is not valid; or that there are none or too many, or that the last one does
    /// not return.
    pub fn verify(raw: &[RawInstruction]) -> Result<Self, BadProgram> {
        match raw.len() {
            0 => return Err(BadProgram::Empty),
            1..=INSTRUCTIONS_MAX => {}
            len => return Err(BadProgram::TooLong(len)),
        }
        let decode =
            |(at, raw_instruction): (usize, &RawInstruction)| decode(*raw_instruction, at, raw.len());
        let instructions: Vec<Instruction> = raw.iter().enumerate().map(decode).collect::<Result<_, _>>()?;
        match instructions.last() {
            Some(Instruction::ReturnConstant(_) | Instruction::ReturnA) => {
                Ok(Self { instructions: instructions.into() })
            }
            _ => Err(BadProgram::NoReturn),
        }
    }
}

/// Decodes the instruction at index `at` of a program of `len` instructions.
fn decode(raw: RawInstruction, at: usize, len: usize) -> Result<Instruction, BadProgram> {
    let RawInstruction { code, jt, jf, k } = raw;
    // Cannot truncate: the number is below 16.
    let memory = || if k < MEMORY_WORDS { Ok(k as u8) } else { Err(BadProgram::WildMemory(at)) };
    // Jumps go forward, to an instruction that exists.
    let jump = |skip: u32| {
        let is_inside = (skip as usize) < len - at - 1;
        if is_inside { Ok(()) } else { Err(BadProgram::WildJump(at)) }
    };
    let operand = if code & 8 == 0 { Operand::Constant(k) } else { Operand::X };
    let instruction = match code {
        0x20 => Instruction::Load { size: 4, indexed: false, at: k },
        0x28 => Instruction::Load { size: 2, indexed: false, at: k },
        0x30 => Instruction::Load { size: 1, indexed: false, at: k },
        0x40 => Instruction::Load { size: 4, indexed: true, at: k },
        0x48 => Instruction::Load { size: 2, indexed: true, at: k },
        0x50 => Instruction::Load { size: 1, indexed: true, at: k },
        LD => Instruction::LoadConstant(k),
        0x60 => Instruction::LoadMemory(memory()?),
        0x80 => Instruction::LoadLength,
        LDX => Instruction::LoadXConstant(k),
        0x61 => Instruction::LoadXMemory(memory()?),
        0x81 => Instruction::LoadXLength,
        0xb1 => Instruction::LoadXHeaderLength(k),
        ST => Instruction::Store(memory()?),
        STX => Instruction::StoreX(memory()?),
        RET => Instruction::ReturnConstant(k),
        0x16 => Instruction::ReturnA,
        0x07 => Instruction::AToX,
        0x87 => Instruction::XToA,
        0x84 => Instruction::Negate,
        JMP => {
            jump(k)?;
            Instruction::Jump(k)
        }
        _ => match code & 7 {
            ALU => {
                let operation = match code & !0xf {
                    0x00 => Operation::Add,
                    0x10 => Operation::Subtract,
                    0x20 => Operation::Multiply,
                    0x30 => Operation::Divide,
                    0x40 => Operation::Or,
                    0x50 => Operation::And,
                    0x60 => Operation::ShiftLeft,
                    0x70 => Operation::ShiftRight,
                    0x90 => Operation::Modulo,
                    0xa0 => Operation::Xor,
                    _ => return Err(BadProgram::UnknownOperation(at, code)),
                };
                match (operation, operand) {
                    (Operation::Divide | Operation::Modulo, Operand::Constant(0)) => {
                        return Err(BadProgram::DivisionByZero(at));
                    }
                    (Operation::ShiftLeft | Operation::ShiftRight, Operand::Constant(32..)) => {
                        return Err(BadProgram::WildShift(at));
                    }
                    _ => Instruction::Compute(operation, operand),
                }
            }
            JMP => {
                let test = match code & !0xf {
                    0x10 => Test::Equal,
                    0x20 => Test::Greater,
                    0x30 => Test::GreaterOrEqual,
                    0x40 => Test::BitsSet,
                    _ => return Err(BadProgram::UnknownOperation(at, code)),
                };
                jump(jt.into())?;
                jump(jf.into())?;
                Instruction::Branch { test, operand, jt, jf }
            }
            _ => return Err(BadProgram::UnknownOperation(at, code)),
        },
    };
    Ok(instruction)
}

#[cfg(test)]
mod tests;
