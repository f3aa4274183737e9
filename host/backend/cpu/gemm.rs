//! Matrix products on tiles, by the `gemm` crate, behind slices whose bounds are checked once.

use gemm::Parallelism;

/// A strided matrix inside a slice: element (i, j) is `data[i * row + j * col]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a, T> {
    data: &'a [T],
    row: usize,
    col: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// Rows of `stride` elements.
    pub fn rows(data: &'a [T], stride: usize) -> Self {
        Self { data, row: stride, col: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self { row: self.col, col: self.row, ..self }
    }

    fn assert_holds(&self, m: usize, n: usize) {
        assert!(
            m == 0 || n == 0 || (m - 1) * self.row + (n - 1) * self.col < self.data.len(),
            "matrix outside its slice"
        );
    }
}

/// Whether the product replaces the destination or is added to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// dst = a b
    Set,
    /// dst = dst + a b
    Add,
}

/// `dst` [m, n] with rows of `stride` elements becomes (or gains) `a` [m, k] times `b` [k, n]; single-threaded,
/// since the callers run one tile a thread.
///
/// # Panics
/// When a matrix does not fit into its slice.
pub fn gemm<T: Copy + One + 'static>(
    [m, n, k]: [usize; 3],
    dst: &mut [T],
    stride: usize,
    write: Write,
    a: Matrix<T>,
    b: Matrix<T>,
) {
    Matrix::rows(dst, stride).assert_holds(m, n);
    a.assert_holds(m, k);
    b.assert_holds(k, n);
    // SAFETY: the three assertions above keep every element that the product touches inside its slice; dst is
    // borrowed mutably, so it overlaps neither a nor b.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            stride as isize,
            write == Write::Add,
            a.data.as_ptr(),
            a.col as isize,
            a.row as isize,
            b.data.as_ptr(),
            b.col as isize,
            b.row as isize,
            T::ONE,
            T::ONE,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// The factor of a plain product.
pub trait One {
    /// 1
    const ONE: Self;
}
impl One for f32 {
    const ONE: f32 = 1.0;
}
impl One for f64 {
    const ONE: f64 = 1.0;
}
