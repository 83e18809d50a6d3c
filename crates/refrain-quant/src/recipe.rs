//! Named file types: a base type, and the tensors that get another one.
//!
//! The rules are those of llama.cpp, so that a file of a name has the size and quality that its users expect. Models with
//! recurrent layers differ: their sensitive matrices stay at eight bits.

use refrain_tensor::DType;

/// A file type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    name: &'static str,
    base: DType,
    mix: Mix,
    /// llama.cpp's number, `general.file_type`.
    file_type: u32,
}

/// Which tensors differ from the base type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mix {
    /// All matrices alike.
    Float,
    /// Only the output matrix differs.
    Plain,
    Q2K,
    Q2KS,
    Q3KM,
    Q3KL,
    Q4KS,
    Q4KM,
    Q5KM,
    Iq4,
    /// Only experts have the type of the name.
    Mxfp4Experts,
}

const fn recipe(name: &'static str, base: DType, mix: Mix, file_type: u32) -> Recipe {
    Recipe { name, base, mix, file_type }
}

const RECIPES: [Recipe; 22] = [
    recipe("Q2_K", DType::Q2_K, Mix::Q2K, 10),
    recipe("Q2_K_S", DType::Q2_K, Mix::Q2KS, 21),
    recipe("Q3_K_S", DType::Q3_K, Mix::Plain, 11),
    recipe("Q3_K_M", DType::Q3_K, Mix::Q3KM, 12),
    recipe("Q3_K_L", DType::Q3_K, Mix::Q3KL, 13),
    recipe("Q4_0", DType::Q4_0, Mix::Plain, 2),
    recipe("Q4_1", DType::Q4_1, Mix::Plain, 3),
    recipe("IQ4_NL", DType::IQ4_NL, Mix::Iq4, 25),
    recipe("IQ4_XS", DType::IQ4_XS, Mix::Iq4, 30),
    recipe("MXFP4", DType::MXFP4, Mix::Plain, 38),
    recipe("MXFP4_MOE", DType::Q8_0, Mix::Mxfp4Experts, 38),
    recipe("Q4_K_S", DType::Q4_K, Mix::Q4KS, 14),
    recipe("Q4_K_M", DType::Q4_K, Mix::Q4KM, 15),
    recipe("Q5_0", DType::Q5_0, Mix::Plain, 8),
    recipe("Q5_1", DType::Q5_1, Mix::Plain, 9),
    recipe("Q5_K_S", DType::Q5_K, Mix::Plain, 16),
    recipe("Q5_K_M", DType::Q5_K, Mix::Q5KM, 17),
    recipe("Q6_K", DType::Q6_K, Mix::Plain, 18),
    recipe("Q8_0", DType::Q8_0, Mix::Plain, 7),
    recipe("F16", DType::F16, Mix::Float, 1),
    recipe("BF16", DType::BF16, Mix::Float, 32),
    recipe("F32", DType::F32, Mix::Float, 0),
];

/// Short names of the usual choice among several.
const ALIASES: [(&str, &str); 3] = [("Q3_K", "Q3_K_M"), ("Q4_K", "Q4_K_M"), ("Q5_K", "Q5_K_M")];

impl Recipe {
    /// All recipes, smaller files first.
    pub fn all() -> &'static [Recipe] {
        &RECIPES
    }

    /// Finds a recipe by name, ignoring case. `Q4_K` is `Q4_K_M`, as in llama.cpp.
    pub fn from_name(name: &str) -> Option<Recipe> {
        let full =
            ALIASES.iter().find(|(short, _)| short.eq_ignore_ascii_case(name)).map_or(name, |(_, full)| full);
        RECIPES.into_iter().find(|recipe| recipe.name.eq_ignore_ascii_case(full))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The type of most matrices.
    pub fn base(self) -> DType {
        self.base
    }

    /// llama.cpp's number of this file type.
    pub fn file_type(self) -> u32 {
        self.file_type
    }

    /// The type of a matrix, before its shape is considered.
    pub(crate) fn dtype(self, tensor: &TensorFacts, model: &ModelFacts) -> DType {
        if self.mix == Mix::Float {
            return self.base;
        }
        let is_output =
            tensor.name == "output.weight" || tensor.name == "token_embd.weight" && !model.has_output;
        if is_output {
            let is_small = !tensor.row_len.is_multiple_of(256) || self.base == DType::Q8_0;
            return if is_small { DType::Q8_0 } else { DType::Q6_K };
        }
        if tensor.name == "token_embd.weight" || tensor.name == "per_layer_token_embd.weight" {
            return self.base;
        }
        if self.mix == Mix::Mxfp4Experts {
            let is_expert = tensor.part.contains("_exps.");
            return if is_expert { DType::MXFP4 } else { self.base };
        }
        if model.is_recurrent && is_sensitive_in_recurrent_models(tensor.part) {
            return DType::Q8_0;
        }
        match tensor.part {
            "attn_v.weight" => self.of_values(tensor, model),
            "attn_k.weight" if model.n_experts == 8 => DType::Q8_0,
            "ffn_down.weight" | "ffn_down_exps.weight" | "ffn_down_shexp.weight" => {
                self.of_down(tensor, model)
            }
            "attn_output.weight" => self.of_attention_output(model),
            "attn_qkv.weight" => match self.mix {
                Mix::Q3KM | Mix::Q3KL => DType::Q4_K,
                Mix::Q4KM => DType::Q5_K,
                Mix::Q5KM => DType::Q6_K,
                _ => self.base,
            },
            _ => self.base,
        }
    }

    fn of_values(self, tensor: &TensorFacts, model: &ModelFacts) -> DType {
        let (i, n) = tensor.rank;
        let is_grouped = model.n_heads_per_kv >= 4;
        let chosen = match self.mix {
            Mix::Q2K if is_grouped => DType::Q4_K,
            Mix::Q2K => DType::Q3_K,
            Mix::Q2KS if is_grouped => DType::Q4_K,
            Mix::Iq4 if is_grouped => DType::Q5_K,
            Mix::Q3KM if i < 2 => DType::Q5_K,
            Mix::Q3KM => DType::Q4_K,
            Mix::Q3KL => DType::Q5_K,
            Mix::Q4KM | Mix::Q5KM if wants_more_bits(i, n) => DType::Q6_K,
            Mix::Q4KS if i < 4 => DType::Q5_K,
            _ => self.base,
        };
        match chosen {
            // Eight heads share these values: they are small, and errors in them count eight times.
            DType::Q3_K | DType::Q4_K if model.n_layers == 80 && model.is_llama => DType::Q5_K,
            _ if model.n_experts == 8 => DType::Q8_0,
            chosen => chosen,
        }
    }

    fn of_down(self, tensor: &TensorFacts, model: &ModelFacts) -> DType {
        let (i, n) = tensor.rank;
        match self.mix {
            Mix::Q2K => DType::Q3_K,
            Mix::Q2KS if i < n / 8 => DType::Q4_K,
            Mix::Q3KM if i < n / 16 => DType::Q5_K,
            Mix::Q3KM => DType::Q4_K,
            Mix::Q3KL => DType::Q5_K,
            Mix::Q4KM | Mix::Q5KM if wants_more_bits(i, n) => DType::Q6_K,
            Mix::Iq4 if i < n / 8 && !model.has_imatrix => DType::Q5_K,
            Mix::Q4KS if i < n / 8 => DType::Q5_K,
            // With an importance matrix, llama.cpp spends a little more on the first layers.
            Mix::Plain if i < n / 8 && model.has_imatrix && self.base == DType::Q4_0 => DType::Q4_1,
            Mix::Plain if i < n / 8 && model.has_imatrix && self.base == DType::Q5_0 => DType::Q5_1,
            _ => self.base,
        }
    }

    fn of_attention_output(self, model: &ModelFacts) -> DType {
        let has_few_bits =
            matches!(self.base, DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::IQ4_NL | DType::IQ4_XS);
        match self.mix {
            _ if model.n_experts == 8 && has_few_bits => DType::Q5_K,
            Mix::Q2K => DType::Q3_K,
            Mix::Q3KM => DType::Q4_K,
            Mix::Q3KL => DType::Q5_K,
            _ => self.base,
        }
    }
}

/// The first and last eighth of the layers, and every third between.
fn wants_more_bits(i: usize, n: usize) -> bool {
    i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
}

/// Errors in these matrices stay in a recurrent state, or pass through the few layers that attend.
fn is_sensitive_in_recurrent_models(part: &str) -> bool {
    part.starts_with("attn_") || part.starts_with("ssm_") || part.starts_with("shortconv.")
}

/// What the rules ask about a model.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelFacts {
    pub(crate) is_llama: bool,
    pub(crate) is_recurrent: bool,
    pub(crate) n_layers: usize,
    pub(crate) n_heads_per_kv: usize,
    pub(crate) n_experts: usize,
    pub(crate) has_output: bool,
    pub(crate) has_imatrix: bool,
}

/// What the rules ask about a tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorFacts<'a> {
    pub(crate) name: &'a str,
    /// The name in its layer, or the whole name.
    pub(crate) part: &'a str,
    pub(crate) row_len: usize,
    /// Its place among the tensors of this kind, and their number.
    pub(crate) rank: (usize, usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelFacts {
        ModelFacts {
            is_llama: true,
            n_layers: 32,
            n_heads_per_kv: 4,
            has_output: true,
            ..ModelFacts::default()
        }
    }

    fn of(name: &str, part: &str, layer: usize, recipe: &str) -> DType {
        let tensor = TensorFacts { name, part, row_len: 4096, rank: (layer, 32) };
        Recipe::from_name(recipe).unwrap().dtype(&tensor, &model())
    }

    #[test]
    fn the_mixes_give_more_bits_to_the_tensors_that_need_them() {
        let v = |layer, recipe| of("blk.0.attn_v.weight", "attn_v.weight", layer, recipe);
        let down = |layer, recipe| of("blk.0.ffn_down.weight", "ffn_down.weight", layer, recipe);
        let out = |recipe| of("blk.0.attn_output.weight", "attn_output.weight", 0, recipe);
        assert_eq!(
            [v(0, "Q4_K_M"), v(4, "Q4_K_M"), v(6, "Q4_K_M"), v(28, "q4_k")],
            [DType::Q6_K, DType::Q4_K, DType::Q6_K, DType::Q6_K]
        );
        assert_eq!(
            [down(3, "Q4_K_S"), down(4, "Q4_K_S"), v(3, "Q4_K_S"), v(4, "Q4_K_S")],
            [DType::Q5_K, DType::Q4_K, DType::Q5_K, DType::Q4_K]
        );
        assert_eq!([v(0, "Q2_K"), down(9, "Q2_K"), out("Q2_K")], [DType::Q4_K, DType::Q3_K, DType::Q3_K]);
        assert_eq!(
            [v(1, "Q3_K_M"), v(2, "Q3_K_M"), down(1, "Q3_K_M"), down(2, "Q3_K_M")],
            [DType::Q5_K, DType::Q4_K, DType::Q5_K, DType::Q4_K]
        );
        assert_eq!([v(5, "Q3_K_L"), out("Q3_K_L"), v(5, "Q3_K_S")], [DType::Q5_K, DType::Q5_K, DType::Q3_K]);
        assert_eq!([v(5, "IQ4_XS"), down(0, "IQ4_NL")], [DType::Q5_K, DType::Q5_K]);
    }

    #[test]
    fn the_output_matrix_has_at_least_six_bits_and_floats_have_no_exceptions() {
        for recipe in Recipe::all() {
            let tensor =
                TensorFacts { name: "output.weight", part: "output.weight", row_len: 4096, rank: (0, 0) };
            let want = match recipe.base() {
                base if base.is_float() => base,
                DType::Q8_0 => DType::Q8_0,
                _ => DType::Q6_K,
            };
            assert_eq!(recipe.dtype(&tensor, &model()), want, "{}", recipe.name());
        }
        let narrow =
            TensorFacts { name: "token_embd.weight", part: "token_embd.weight", row_len: 576, rank: (0, 0) };
        let tied = ModelFacts { has_output: false, ..model() };
        assert_eq!(Recipe::from_name("Q4_K_M").unwrap().dtype(&narrow, &tied), DType::Q8_0);
    }

    #[test]
    fn matrices_of_recurrent_layers_and_attention_stay_wide_in_hybrids() {
        let hybrid = ModelFacts { is_recurrent: true, ..model() };
        let recipe = Recipe::from_name("Q4_K_M").unwrap();
        for part in ["ssm_out.weight", "attn_q.weight", "attn_gate.weight"] {
            let tensor = TensorFacts { name: part, part, row_len: 4096, rank: (5, 32) };
            assert_eq!(recipe.dtype(&tensor, &hybrid), DType::Q8_0, "{part}");
        }
        let up = TensorFacts { name: "ffn_up.weight", part: "ffn_up.weight", row_len: 4096, rank: (5, 32) };
        assert_eq!(recipe.dtype(&up, &hybrid), DType::Q4_K);
    }
}
