//! The BPF program that chooses the listener of a new connection: that of the CPU which receives it.

/// An instruction of classic BPF.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    operand: u32,
}

/// Upper limit of the length of a program in the kernel (`BPF_MAXINSNS`).
pub const INSTRUCTIONS_MAX: usize = 4096;

/// `BPF_LD | BPF_W | BPF_ABS`
const LOAD: u16 = 0x20;
/// `BPF_ALU | BPF_MOD | BPF_K`
const MODULO: u16 = 0x94;
/// `BPF_JMP | BPF_JA`
const JUMP: u16 = 0x05;
/// `BPF_JMP | BPF_JEQ | BPF_K`
const JUMP_IF_EQUAL: u16 = 0x15;
/// `BPF_RET | BPF_K`
const RETURN: u16 = 0x06;
/// `SKF_AD_OFF + SKF_AD_CPU`: the CPU that runs the program.
const CPU: u32 = 0xffff_f000 + 36;
/// `SKF_AD_OFF + SKF_AD_RANDOM`
const RANDOM: u32 = 0xffff_f000 + 56;

/// A listener of the group from which a worker accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveListener {
    /// Index in the kernel's group.
    pub index: u32,
    /// CPU whose connections it gets; `None` for those of CPUs without a listener.
    pub cpu: Option<u32>,
}

/// Appends instructions to a buffer of limited length.
struct Writer<'a> {
    program: &'a mut [Instruction],
    len: usize,
}

impl Writer<'_> {
    fn push(&mut self, code: u16, if_true: u8, if_false: u8, operand: u32) -> Option<()> {
        *self.program.get_mut(self.len)? = Instruction { code, if_true, if_false, operand };
        self.len += 1;
        Some(())
    }

    /// Appends instructions that return one of `count` indexes, at random if there are several.
    fn push_choice(&mut self, count: u32, indexes: impl Iterator<Item = u32>) -> Option<()> {
        if count > 1 {
            self.push(LOAD, 0, 0, RANDOM)?;
            self.push(MODULO, 0, 0, count)?;
        }
        for (number, index) in (0..count).zip(indexes) {
            if number + 1 < count {
                self.push(JUMP_IF_EQUAL, 0, 1, number)?;
            }
            self.push(RETURN, 0, 0, index)?;
        }
        Some(())
    }
}

/// Writes the program for the active listeners and returns its length in instructions. Without an active
/// listener index 0 gets all connections. Returns `None` if the program does not fit.
pub fn write_program(
    program: &mut [Instruction],
    active: impl Iterator<Item = ActiveListener> + Clone,
) -> Option<usize> {
    let mut writer = Writer { program, len: 0 };
    writer.push(LOAD, 0, 0, CPU)?;
    for (position, first) in active.clone().enumerate() {
        let is_of_cpu = |other: &ActiveListener| other.cpu == first.cpu;
        if first.cpu.is_none() || active.clone().take(position).any(|other| is_of_cpu(&other)) {
            continue;
        }
        let of_cpu = active.clone().filter(is_of_cpu);
        writer.push(JUMP_IF_EQUAL, 1, 0, first.cpu?)?;
        let jump = writer.len;
        writer.push(JUMP, 0, 0, 0)?;
        writer.push_choice(of_cpu.clone().count() as u32, of_cpu.map(|other| other.index))?;
        writer.program[jump].operand = (writer.len - jump - 1) as u32;
    }
    let shared = active.clone().filter(|other| other.cpu.is_none());
    if shared.clone().next().is_some() {
        writer.push_choice(shared.clone().count() as u32, shared.map(|other| other.index))?;
    } else if active.clone().next().is_some() {
        writer.push_choice(active.clone().count() as u32, active.map(|other| other.index))?;
    } else {
        writer.push(RETURN, 0, 0, 0)?;
    }
    Some(writer.len)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a program as the kernel does.
    fn run(program: &[Instruction], cpu: u32, random: u32) -> u32 {
        let (mut accumulator, mut at) = (0, 0);
        loop {
            let Instruction { code, if_true, if_false, operand } = program[at];
            at += 1;
            match code {
                LOAD if operand == CPU => accumulator = cpu,
                LOAD => accumulator = random,
                MODULO => accumulator %= operand,
                JUMP => at += operand as usize,
                JUMP_IF_EQUAL => {
                    at += usize::from(if accumulator == operand { if_true } else { if_false });
                }
                _ => return operand,
            }
        }
    }

    fn chosen(active: &[(u32, Option<u32>)], cpu: u32) -> Vec<u32> {
        let mut program = [Instruction::default(); INSTRUCTIONS_MAX];
        let listeners = active.iter().map(|&(index, cpu)| ActiveListener { index, cpu });
        let len = write_program(&mut program, listeners).unwrap();
        let mut all: Vec<u32> = (0..600).map(|random| run(&program[..len], cpu, random)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    #[test]
    fn each_cpu_has_its_own_listeners() {
        let active = [(0, Some(0)), (1, Some(1)), (2, Some(0)), (5, Some(3))];
        assert_eq!(chosen(&active, 0), [0, 2]);
        assert_eq!(chosen(&active, 1), [1]);
        assert_eq!(chosen(&active, 3), [5]);
        assert_eq!(chosen(&active, 2), [0, 1, 2, 5], "a CPU without a listener uses all");
    }

    #[test]
    fn listeners_without_cpu_serve_the_other_cpus() {
        let active = [(4, Some(0)), (1, None), (3, None)];
        assert_eq!(chosen(&active, 0), [4]);
        assert_eq!(chosen(&active, 7), [1, 3]);
    }

    #[test]
    fn nobody_active_means_the_first() {
        assert_eq!(chosen(&[], 1), [0]);
    }

    #[test]
    fn many_listeners_fit() {
        let own: Vec<_> = (0..256).map(|n| (n, Some(n))).collect();
        assert_eq!(chosen(&own, 255), [255]);
        let one_cpu: Vec<_> = (0..256).map(|n| (n, Some(1))).collect();
        assert_eq!(chosen(&one_cpu, 1).len(), 256);
        let listeners = (0..256).map(|index| ActiveListener { index, cpu: Some(1) });
        assert_eq!(write_program(&mut [Instruction::default(); 100], listeners), None);
    }
}
