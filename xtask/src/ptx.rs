//! What happens to the compiler's PTX before it is committed: launch bounds in, debug sections out, and a
//! head line that names the compiler.

use anyhow::{Result, bail, ensure};
use kernels_gpu::kernels::Entry;

/// The head line's beginning; the compiler follows.
const MADE_BY: &str = "// kernels-gpu compiled by ";

/// The PTX as it is committed.
///
/// # Errors
/// If an entry of `entries` is not in the text exactly once, the text has an entry that the table does not
/// know, or a register array went to local memory.
pub fn finish(raw: &str, compiler: &str, entries: &[Entry]) -> Result<String> {
    let mut text = strip_debug(raw);
    let found: Vec<&str> = text.lines().filter_map(entry_name).collect();
    for name in &found {
        ensure!(
            entries.iter().any(|e| e.name == *name),
            "{name} is not in the table of kernels (kernels/mod.rs)"
        );
    }
    for entry in entries {
        text = bound(&text, entry)?;
    }
    ensure!(!text.contains("__local_depot"), "a register array went to local memory (__local_depot)");
    Ok(format!("{MADE_BY}{compiler}\n{text}"))
}

/// The compiler that a committed PTX names.
pub fn compiler(ptx: &str) -> Option<&str> {
    ptx.lines().next()?.strip_prefix(MADE_BY)
}

/// `.visible .entry NAME(` -> NAME.
fn entry_name(line: &str) -> Option<&str> {
    line.strip_prefix(".visible .entry ").map(|rest| rest.trim_end_matches(['(', ')', ' ']))
}

/// Inserts the launch bounds of one entry between its parameter list and its body. Rust has no attribute
/// for them, and without them ptxas ignores `setmaxnreg` and spreads registers for 1,024 threads.
fn bound(text: &str, entry: &Entry) -> Result<String> {
    let mut out = String::with_capacity(text.len() + 64);
    let (mut inside, mut inserted) = (false, 0);
    for line in text.lines() {
        inside |= entry_name(line) == Some(entry.name);
        if inside && line.starts_with(".maxntid") {
            bail!("{} already has launch bounds", entry.name);
        }
        if inside && line == "{" {
            out += &format!(".maxntid {}, 1, 1\n.minnctapersm {}\n", entry.threads, entry.min_ctas_per_sm);
            inserted += 1;
            inside = false;
        }
        out += line;
        out.push('\n');
    }
    ensure!(inserted == 1, "{} is in the PTX {inserted} times, not once", entry.name);
    Ok(out)
}

/// Cuts `.loc`, `.file` and `.section` blocks: ptxas rejects the debug sections of PTX 8.0.
fn strip_debug(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_section = false;
    for line in text.lines() {
        let word = line.trim_start();
        if in_section {
            in_section = word != "}";
        } else if word.starts_with(".section") {
            in_section = true;
        } else if !(word.starts_with(".loc ") || word.starts_with(".loc\t") || word.starts_with(".file")) {
            out += line.strip_suffix(", debug").filter(|_| line.starts_with(".target")).unwrap_or(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: &str = ".version 8.0\n.target sm_90a, debug\n.visible .entry one(\n\t.param .u64 p\n)\n{\n\t.loc 1 2 3\n\
                       \tret;\n}\n.section .debug_info\n{\n.b8 1\n}\n";

    fn entry(name: &'static str) -> Entry {
        Entry { name, threads: 384, min_ctas_per_sm: 1, dynamic_shared: 0 }
    }

    #[test]
    fn bounds_go_in_front_of_the_body_and_debug_goes_out() {
        let out = finish(RAW, "rustc 1", &[entry("one")]).unwrap();
        assert_eq!(
            out,
            "// kernels-gpu compiled by rustc 1\n.version 8.0\n.target sm_90a\n.visible .entry one(\n\t.param .u64 p\n)\n\
             .maxntid 384, 1, 1\n.minnctapersm 1\n{\n\tret;\n}\n"
        );
        assert_eq!(compiler(&out), Some("rustc 1"));
    }

    #[test]
    fn table_and_text_must_name_the_same_entries() {
        assert!(finish(RAW, "rustc 1", &[]).unwrap_err().to_string().contains("one is not in the table"));
        let missing = finish(RAW, "rustc 1", &[entry("one"), entry("two")]).unwrap_err();
        assert!(missing.to_string().contains("two is in the PTX 0 times"));
        let twice = finish(RAW, "rustc 1", &[entry("one"), entry("one")]).unwrap_err();
        assert!(twice.to_string().contains("already has launch bounds"));
    }

    #[test]
    fn local_memory_is_refused() {
        let raw = RAW.replace("\tret;", "\t.local .align 4 .b8 __local_depot0[16];\n\tret;");
        assert!(finish(&raw, "rustc 1", &[entry("one")]).unwrap_err().to_string().contains("__local_depot"));
    }
}
