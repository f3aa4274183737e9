//! Figures as PNG, drawn with a font that is part of the program.

mod canvas;
mod compare;
mod inspect;

pub use compare::compare;
pub use inspect::inspect;
