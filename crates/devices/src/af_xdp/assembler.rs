//! A small assembler for BPF programs. It supports the instructions that this crate's programs use, and
//! rejects mistakes that the kernel would report less clearly: backward jumps, undefined and duplicate
//! labels, writes to the frame pointer, and a missing exit.

use std::fmt;

/// One instruction: `struct bpf_insn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Instruction {
    code: u8,
    /// Destination register in the low four bits, source register in the high four bits.
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// A register. `R0` holds the result of a call and of the program; calls clobber `R1` to `R5` and preserve
/// `R6` to `R9`; `R10` is the frame pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    R10,
}

/// The second operand of arithmetic and comparisons.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand {
    Register(Reg),
    Immediate(i32),
}

impl From<Reg> for Operand {
    fn from(register: Reg) -> Self {
        Self::Register(register)
    }
}

impl From<i32> for Operand {
    fn from(value: i32) -> Self {
        Self::Immediate(value)
    }
}

/// Width of a load or store.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Width {
    Byte = 0x10,
    Half = 0x08,
    Word = 0x00,
    Double = 0x18,
}

/// A 64-bit arithmetic operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum AluOp {
    Add = 0x00,
    And = 0x50,
    ShiftLeft = 0x60,
    ShiftRight = 0x70,
    Modulo = 0x90,
    Xor = 0xa0,
    Move = 0xb0,
}

/// Condition of a jump. Comparisons are unsigned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum JumpCondition {
    Equal = 0x10,
    Greater = 0x20,
    NotEqual = 0x50,
    Less = 0xa0,
}

const CLASS_LD: u8 = 0x00;
const CLASS_LDX: u8 = 0x01;
const CLASS_STX: u8 = 0x03;
const CLASS_ST: u8 = 0x02;
const CLASS_JMP: u8 = 0x05;
const CLASS_ALU64: u8 = 0x07;
const MODE_MEM: u8 = 0x60;
const MODE_ABSOLUTE: u8 = 0x20;
const MODE_INDIRECT: u8 = 0x40;
const SOURCE_REGISTER: u8 = 0x08;
const JUMP_ALWAYS: u8 = CLASS_JMP;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// `BPF_ALU | BPF_END | BPF_TO_BE`.
const TO_BIG_ENDIAN: u8 = 0xdc;
/// `BPF_LD | BPF_DW | BPF_IMM`: loads 64 bits, and takes two instructions.
const LOAD_DOUBLE: u8 = 0x18;
/// `BPF_STX | BPF_DW | BPF_ATOMIC`; the immediate selects the operation: 0 adds.
const ATOMIC: u8 = 0xdb;
/// Source register of `LOAD_DOUBLE` if the immediate is the descriptor of a map (`BPF_PSEUDO_MAP_FD`).
const PSEUDO_MAP_FD: u8 = 1;
/// Source register of `LOAD_DOUBLE` if the immediate is the descriptor of an array map, and the second
/// immediate an offset into its only value (`BPF_PSEUDO_MAP_VALUE`).
const PSEUDO_MAP_VALUE: u8 = 2;

/// Target of a jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JumpLabel(usize);

/// Reason why a program is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AssemblyError {
    /// A jump goes to a label that is not bound.
    UndefinedLabel(JumpLabel),
    /// A label is bound twice.
    DuplicateLabel(JumpLabel),
    /// A jump goes backwards, so the program might not terminate.
    BackwardJump(JumpLabel),
    /// A jump spans more than 32,767 instructions.
    JumpTooFar(JumpLabel),
    /// An instruction writes to the frame pointer, which is read-only.
    FramePointerWrite,
    /// The program does not end with an exit or a jump, or a label is bound after its last instruction.
    MissingExit,
}

impl fmt::Display for AssemblyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BPF program: {self:?}")
    }
}

/// A program under construction.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    code: Vec<Instruction>,
    /// Index of the instruction that each label is bound to.
    labels: Vec<Option<usize>>,
    /// Instructions that jump, with their targets.
    jumps: Vec<(usize, JumpLabel)>,
    error: Option<AssemblyError>,
}

impl Assembler {
    /// Creates a label that is not bound yet.
    pub(crate) fn label(&mut self) -> JumpLabel {
        self.labels.push(None);
        JumpLabel(self.labels.len() - 1)
    }

    /// Binds the label to the next instruction.
    pub(crate) fn bind(&mut self, label: JumpLabel) {
        if self.labels[label.0].replace(self.code.len()).is_some() {
            self.fail(AssemblyError::DuplicateLabel(label));
        }
    }

    /// Emits `to = to OP operand`.
    pub(crate) fn alu(&mut self, op: AluOp, to: Reg, operand: impl Into<Operand>) {
        self.check_destination(to);
        self.push_with_operand(CLASS_ALU64 | op as u8, to, operand.into(), 0);
    }

    /// Emits `to = operand`.
    pub(crate) fn mov(&mut self, to: Reg, operand: impl Into<Operand>) {
        self.alu(AluOp::Move, to, operand);
    }

    /// Converts the low 16 bits of a register from network to host byte order.
    pub(crate) fn be16_to_host(&mut self, register: Reg) {
        self.check_destination(register);
        self.push(TO_BIG_ENDIAN, register, Reg::R0, 0, 16);
    }

    /// Emits `to = *(from + offset)`.
    pub(crate) fn load(&mut self, width: Width, to: Reg, from: Reg, offset: i16) {
        self.check_destination(to);
        self.push(CLASS_LDX | MODE_MEM | width as u8, to, from, offset, 0);
    }

    /// Loads bytes of a packet into `R0`, in host byte order, for programs on socket buffers. `R6` must hold
    /// the context, and `R1` to `R5` are clobbered. The program ends with 0 if the packet is too short.
    pub(crate) fn load_packet(&mut self, width: Width, offset: i32) {
        self.push(CLASS_LD | MODE_ABSOLUTE | width as u8, Reg::R0, Reg::R0, 0, offset);
    }

    /// As [`Assembler::load_packet`], from `base` on.
    pub(crate) fn load_packet_at(&mut self, width: Width, base: Reg, offset: i32) {
        self.push(CLASS_LD | MODE_INDIRECT | width as u8, Reg::R0, base, 0, offset);
    }

    /// Emits `*(to + offset) = from`.
    pub(crate) fn store(&mut self, width: Width, to: Reg, offset: i16, from: impl Into<Operand>) {
        match from.into() {
            Operand::Register(from) => self.push(CLASS_STX | MODE_MEM | width as u8, to, from, offset, 0),
            Operand::Immediate(value) => {
                self.push(CLASS_ST | MODE_MEM | width as u8, to, Reg::R0, offset, value);
            }
        }
    }

    /// Emits `*(to + offset) += from`, atomically, with 64 bits.
    pub(crate) fn atomic_add(&mut self, to: Reg, offset: i16, from: Reg) {
        self.push(ATOMIC, to, from, offset, 0);
    }

    /// Loads the map with descriptor `map` into `to`.
    pub(crate) fn map(&mut self, to: Reg, map: i32) {
        self.check_destination(to);
        self.push_pseudo_source(LOAD_DOUBLE, to, PSEUDO_MAP_FD, map);
        self.push(0, Reg::R0, Reg::R0, 0, 0);
    }

    /// Loads the address of byte `offset` of the only value of an array map into `to`.
    pub(crate) fn map_value(&mut self, to: Reg, map: i32, offset: i32) {
        self.check_destination(to);
        self.push_pseudo_source(LOAD_DOUBLE, to, PSEUDO_MAP_VALUE, map);
        self.push(0, Reg::R0, Reg::R0, 0, offset);
    }

    /// Jumps to `to` if `condition` holds between `left` and `right`.
    pub(crate) fn jump_if(
        &mut self,
        condition: JumpCondition,
        left: Reg,
        right: impl Into<Operand>,
        to: JumpLabel,
    ) {
        self.jumps.push((self.code.len(), to));
        self.push_with_operand(CLASS_JMP | condition as u8, left, right.into(), 0);
    }

    /// Jumps unconditionally.
    pub(crate) fn jump(&mut self, to: JumpLabel) {
        self.jumps.push((self.code.len(), to));
        self.push(JUMP_ALWAYS, Reg::R0, Reg::R0, 0, 0);
    }

    /// Calls the kernel helper with number `helper`.
    pub(crate) fn call(&mut self, helper: i32) {
        self.push(CALL, Reg::R0, Reg::R0, 0, helper);
    }

    /// Returns from the program with the value of `R0`.
    pub(crate) fn exit(&mut self) {
        self.push(EXIT, Reg::R0, Reg::R0, 0, 0);
    }

    /// Resolves all jumps and returns the program.
    pub(crate) fn finish(mut self) -> Result<Vec<Instruction>, AssemblyError> {
        for &(from, label) in &self.jumps {
            let to = self.labels[label.0].ok_or(AssemblyError::UndefinedLabel(label))?;
            let distance = to.checked_sub(from + 1).ok_or(AssemblyError::BackwardJump(label))?;
            self.code[from].offset = i16::try_from(distance).map_err(|_| AssemblyError::JumpTooFar(label))?;
        }
        let has_exit =
            self.code.last().is_some_and(|instruction| matches!(instruction.code, EXIT | JUMP_ALWAYS));
        let has_label_at_end = self.labels.contains(&Some(self.code.len()));
        match self.error {
            Some(error) => Err(error),
            None if !has_exit || has_label_at_end => Err(AssemblyError::MissingExit),
            None => Ok(self.code),
        }
    }

    fn check_destination(&mut self, register: Reg) {
        if register == Reg::R10 {
            self.fail(AssemblyError::FramePointerWrite);
        }
    }

    fn fail(&mut self, error: AssemblyError) {
        self.error.get_or_insert(error);
    }

    fn push_with_operand(&mut self, code: u8, left: Reg, right: Operand, offset: i16) {
        match right {
            Operand::Register(right) => self.push(code | SOURCE_REGISTER, left, right, offset, 0),
            Operand::Immediate(value) => self.push(code, left, Reg::R0, offset, value),
        }
    }

    fn push(&mut self, code: u8, destination: Reg, source: Reg, offset: i16, immediate: i32) {
        let registers = destination as u8 | (source as u8) << 4;
        self.code.push(Instruction { code, registers, offset, immediate });
    }

    fn push_pseudo_source(&mut self, code: u8, destination: Reg, source: u8, immediate: i32) {
        let registers = destination as u8 | source << 4;
        self.code.push(Instruction { code, registers, offset: 0, immediate });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(build: impl FnOnce(&mut Assembler)) -> Result<Vec<[u8; 8]>, AssemblyError> {
        let mut assembler = Assembler::default();
        build(&mut assembler);
        let raw = |i: Instruction| {
            let (offset, immediate) = (i.offset.to_le_bytes(), i.immediate.to_le_bytes());
            [
                i.code,
                i.registers,
                offset[0],
                offset[1],
                immediate[0],
                immediate[1],
                immediate[2],
                immediate[3],
            ]
        };
        Ok(assembler.finish()?.into_iter().map(raw).collect())
    }

    /// Compares encodings with those of RFC 9669.
    #[test]
    fn instructions_are_encoded_as_specified() {
        let code = bytes(|a| {
            let end = a.label();
            a.mov(Reg::R6, Reg::R1);
            a.mov(Reg::R0, 2);
            a.alu(AluOp::Add, Reg::R2, -24);
            a.load(Width::Word, Reg::R7, Reg::R1, 4);
            a.load(Width::Half, Reg::R3, Reg::R7, 12);
            a.store(Width::Double, Reg::R10, -24, 0);
            a.store(Width::Word, Reg::R10, -12, Reg::R3);
            a.be16_to_host(Reg::R4);
            a.map(Reg::R1, 7);
            a.map_value(Reg::R2, 8, 16);
            a.atomic_add(Reg::R1, 0, Reg::R2);
            a.jump_if(JumpCondition::Greater, Reg::R2, Reg::R8, end);
            a.jump_if(JumpCondition::NotEqual, Reg::R3, 58, end);
            a.call(51);
            a.load_packet(Width::Half, 12);
            a.load_packet_at(Width::Byte, Reg::R8, 9);
            a.alu(AluOp::Xor, Reg::R1, Reg::R2);
            a.alu(AluOp::Modulo, Reg::R0, 3);
            a.bind(end);
            a.exit();
        });
        let expected = [
            [0xbf, 0x16, 0, 0, 0, 0, 0, 0],
            [0xb7, 0x00, 0, 0, 2, 0, 0, 0],
            [0x07, 0x02, 0, 0, 0xe8, 0xff, 0xff, 0xff],
            [0x61, 0x17, 4, 0, 0, 0, 0, 0],
            [0x69, 0x73, 12, 0, 0, 0, 0, 0],
            [0x7a, 0x0a, 0xe8, 0xff, 0, 0, 0, 0],
            [0x63, 0x3a, 0xf4, 0xff, 0, 0, 0, 0],
            [0xdc, 0x04, 0, 0, 16, 0, 0, 0],
            [0x18, 0x11, 0, 0, 7, 0, 0, 0],
            [0; 8],
            [0x18, 0x22, 0, 0, 8, 0, 0, 0],
            [0, 0, 0, 0, 16, 0, 0, 0],
            [0xdb, 0x21, 0, 0, 0, 0, 0, 0],
            [0x2d, 0x82, 6, 0, 0, 0, 0, 0],
            [0x55, 0x03, 5, 0, 58, 0, 0, 0],
            [0x85, 0x00, 0, 0, 51, 0, 0, 0],
            [0x28, 0x00, 0, 0, 12, 0, 0, 0],
            [0x50, 0x80, 0, 0, 9, 0, 0, 0],
            [0xaf, 0x21, 0, 0, 0, 0, 0, 0],
            [0x97, 0x00, 0, 0, 3, 0, 0, 0],
            [0x95, 0x00, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(code.as_deref(), Ok(&expected[..]));
    }

    #[test]
    fn invalid_programs_are_refused() {
        let refused = |build: fn(&mut Assembler)| bytes(build).expect_err("wrong");
        assert_eq!(
            refused(|a| {
                let nowhere = a.label();
                a.jump(nowhere);
            }),
            AssemblyError::UndefinedLabel(JumpLabel(0))
        );
        assert_eq!(
            refused(|a| {
                let back = a.label();
                a.bind(back);
                a.jump(back);
            }),
            AssemblyError::BackwardJump(JumpLabel(0))
        );
        assert_eq!(
            refused(|a| {
                let twice = a.label();
                a.bind(twice);
                a.bind(twice);
                a.exit();
            }),
            AssemblyError::DuplicateLabel(JumpLabel(0))
        );
        assert_eq!(
            refused(|a| {
                let far = a.label();
                a.jump(far);
                (0..40_000).for_each(|_| a.mov(Reg::R0, 0));
                a.bind(far);
                a.exit();
            }),
            AssemblyError::JumpTooFar(JumpLabel(0))
        );
        assert_eq!(
            refused(|a| {
                a.mov(Reg::R10, 0);
                a.exit();
            }),
            AssemblyError::FramePointerWrite
        );
        assert_eq!(refused(|a| a.mov(Reg::R0, 0)), AssemblyError::MissingExit);
        assert_eq!(refused(|_| {}), AssemblyError::MissingExit);
        assert_eq!(
            refused(|a| {
                let at_end = a.label();
                a.jump_if(JumpCondition::Equal, Reg::R0, 0, at_end);
                a.exit();
                a.bind(at_end);
            }),
            AssemblyError::MissingExit
        );
    }
}
