//! A parsed template: minijinja's syntax tree, owned and limited in depth.

use std::sync::Arc;

use minijinja::machinery::ast;
use minijinja::value::ValueKind;

use super::error::ChatError;

pub(super) use minijinja::machinery::ast::{BinOpKind as BinaryOp, CompareOpKind as CompareOp};

/// Statements and expressions inside each other. Chains such as `a.b.c` and `elif` nest as well.
const MAX_NESTING: usize = 600;

pub(super) type Name = Arc<str>;
pub(super) type Body = Vec<Stmt>;

pub(super) struct Stmt {
    pub(super) line: u32,
    pub(super) kind: StmtKind,
}

pub(super) enum StmtKind {
    Raw(Name),
    Emit(Expr),
    For(Arc<ForLoop>),
    If { test: Expr, yes: Body, no: Body },
    With { assignments: Vec<(Expr, Expr)>, body: Body },
    Set { target: Expr, value: Expr },
    SetBlock { target: Expr, filter: Option<Expr>, body: Body },
    FilterBlock { filter: Expr, body: Body },
    Scope(Body),
    Macro(Arc<Macro>),
    CallBlock { call: Call, caller: Arc<Macro> },
    Do(Call),
    Break,
    Continue,
}

pub(super) struct ForLoop {
    pub(super) target: Expr,
    pub(super) iter: Expr,
    pub(super) filter: Option<Expr>,
    pub(super) is_recursive: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
}

pub(super) struct Macro {
    pub(super) name: Name,
    pub(super) params: Vec<(Name, Option<Expr>)>, // with defaults
    pub(super) body: Body,
}

pub(super) struct Expr {
    pub(super) line: u32,
    pub(super) kind: ExprKind,
}

pub(super) enum ExprKind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Name),
    Var(Name),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    Not(Box<Expr>),
    Neg(Box<Expr>),
    Binary(BinaryOp, Box<[Expr; 2]>),
    Compare(Box<Expr>, Vec<(CompareOp, Expr)>),
    If { test: Box<Expr>, yes: Box<Expr>, no: Option<Box<Expr>> },
    Attr(Box<Expr>, Name),
    Item(Box<[Expr; 2]>),
    Slice { value: Box<Expr>, bounds: Box<[Option<Expr>; 3]> },
    Filter { name: Name, value: Option<Box<Expr>>, args: Vec<CallArg> },
    Test { name: Name, value: Box<Expr>, args: Vec<CallArg> },
    Call(Box<Call>),
}

pub(super) struct Call {
    pub(super) callee: Expr,
    pub(super) args: Vec<CallArg>,
}

pub(super) enum CallArg {
    Positional(Expr),
    Named(Name, Expr),
    List(Expr),
    Map(Expr),
}

/// Converts a parsed template.
pub(super) fn lower(template: &ast::Stmt<'_>) -> Result<Body, ChatError> {
    match template {
        ast::Stmt::Template(template) => TemplateLowering { depth: 0 }.body(&template.children),
        other => TemplateLowering { depth: 0 }.stmt(other).map(|stmt| vec![stmt]),
    }
}

struct TemplateLowering {
    depth: usize,
}

impl TemplateLowering {
    fn deeper<T>(
        &mut self,
        line: u32,
        lower: impl FnOnce(&mut Self) -> Result<T, ChatError>,
    ) -> Result<T, ChatError> {
        if self.depth == MAX_NESTING {
            return Err(ChatError::TooDeep { limit: MAX_NESTING, line: line as usize });
        }
        self.depth += 1;
        let result = lower(self);
        self.depth -= 1;
        result
    }

    fn body(&mut self, body: &[ast::Stmt<'_>]) -> Result<Body, ChatError> {
        body.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    fn stmt(&mut self, stmt: &ast::Stmt<'_>) -> Result<Stmt, ChatError> {
        let line = match stmt {
            ast::Stmt::Template(s) => s.span(),
            ast::Stmt::EmitExpr(s) => s.span(),
            ast::Stmt::EmitRaw(s) => s.span(),
            ast::Stmt::ForLoop(s) => s.span(),
            ast::Stmt::IfCond(s) => s.span(),
            ast::Stmt::WithBlock(s) => s.span(),
            ast::Stmt::Set(s) => s.span(),
            ast::Stmt::SetBlock(s) => s.span(),
            ast::Stmt::AutoEscape(s) => s.span(),
            ast::Stmt::FilterBlock(s) => s.span(),
            ast::Stmt::Macro(s) => s.span(),
            ast::Stmt::CallBlock(s) => s.span(),
            ast::Stmt::Continue(s) => s.span(),
            ast::Stmt::Break(s) => s.span(),
            ast::Stmt::Do(s) => s.span(),
        };
        let line = u32::from(line.start_line);
        let kind = self.deeper(line, |l| l.stmt_kind(stmt))?;
        Ok(Stmt { line, kind })
    }

    fn stmt_kind(&mut self, stmt: &ast::Stmt<'_>) -> Result<StmtKind, ChatError> {
        Ok(match stmt {
            ast::Stmt::Template(s) => StmtKind::Scope(self.body(&s.children)?),
            ast::Stmt::EmitRaw(s) => StmtKind::Raw(s.raw.into()),
            ast::Stmt::EmitExpr(s) => StmtKind::Emit(self.expr(&s.expr)?),
            ast::Stmt::ForLoop(s) => StmtKind::For(Arc::new(ForLoop {
                target: self.expr(&s.target)?,
                iter: self.expr(&s.iter)?,
                filter: self.optional(s.filter_expr.as_ref())?,
                is_recursive: s.recursive,
                body: self.body(&s.body)?,
                otherwise: self.body(&s.else_body)?,
            })),
            ast::Stmt::IfCond(s) => StmtKind::If {
                test: self.expr(&s.expr)?,
                yes: self.body(&s.true_body)?,
                no: self.body(&s.false_body)?,
            },
            ast::Stmt::WithBlock(s) => StmtKind::With {
                assignments: self.pairs(s.assignments.iter().map(|(target, value)| (target, value)))?,
                body: self.body(&s.body)?,
            },
            ast::Stmt::Set(s) => StmtKind::Set { target: self.expr(&s.target)?, value: self.expr(&s.expr)? },
            ast::Stmt::SetBlock(s) => StmtKind::SetBlock {
                target: self.expr(&s.target)?,
                filter: self.optional(s.filter.as_ref())?,
                body: self.body(&s.body)?,
            },
            // Prompts are not HTML: there is nothing to escape.
            ast::Stmt::AutoEscape(s) => StmtKind::Scope(self.body(&s.body)?),
            ast::Stmt::FilterBlock(s) => {
                StmtKind::FilterBlock { filter: self.expr(&s.filter)?, body: self.body(&s.body)? }
            }
            ast::Stmt::Macro(s) => StmtKind::Macro(self.macro_(s)?),
            ast::Stmt::CallBlock(s) => {
                StmtKind::CallBlock { call: self.call(&s.call)?, caller: self.macro_(&s.macro_decl)? }
            }
            ast::Stmt::Do(s) => StmtKind::Do(self.call(&s.call)?),
            ast::Stmt::Continue(_) => StmtKind::Continue,
            ast::Stmt::Break(_) => StmtKind::Break,
        })
    }

    fn macro_(&mut self, source: &ast::Macro<'_>) -> Result<Arc<Macro>, ChatError> {
        let n_required = source.args.len().saturating_sub(source.defaults.len());
        let mut params = Vec::with_capacity(source.args.len());
        for (idx, param) in source.args.iter().enumerate() {
            let name = match param {
                ast::Expr::Var(var) => var.id.into(),
                other => {
                    let line = usize::from(other.span().start_line);
                    return Err(ChatError::Syntax { line, reason: "a parameter is not a name".into() });
                }
            };
            let default = idx.checked_sub(n_required).and_then(|idx| source.defaults.get(idx));
            params.push((name, self.optional(default)?));
        }
        Ok(Arc::new(Macro { name: source.name.into(), params, body: self.body(&source.body)? }))
    }

    fn optional(&mut self, expr: Option<&ast::Expr<'_>>) -> Result<Option<Expr>, ChatError> {
        expr.map(|expr| self.expr(expr)).transpose()
    }

    fn boxed(&mut self, expr: &ast::Expr<'_>) -> Result<Box<Expr>, ChatError> {
        self.expr(expr).map(Box::new)
    }

    fn list(&mut self, exprs: &[ast::Expr<'_>]) -> Result<Vec<Expr>, ChatError> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn pairs<'a, 's: 'a>(
        &mut self,
        pairs: impl Iterator<Item = (&'a ast::Expr<'s>, &'a ast::Expr<'s>)>,
    ) -> Result<Vec<(Expr, Expr)>, ChatError> {
        pairs.map(|(a, b)| Ok((self.expr(a)?, self.expr(b)?))).collect()
    }

    fn expr(&mut self, expr: &ast::Expr<'_>) -> Result<Expr, ChatError> {
        let line = u32::from(expr.span().start_line);
        let kind = self.deeper(line, |l| l.expr_kind(expr))?;
        Ok(Expr { line, kind })
    }

    fn expr_kind(&mut self, expr: &ast::Expr<'_>) -> Result<ExprKind, ChatError> {
        Ok(match expr {
            ast::Expr::Var(e) => ExprKind::Var(e.id.into()),
            ast::Expr::Const(e) => constant(&e.value),
            ast::Expr::List(e) => ExprKind::List(self.list(&e.items)?),
            ast::Expr::Tuple(e) => ExprKind::Tuple(self.list(&e.items)?),
            ast::Expr::Map(e) => ExprKind::Map(self.pairs(e.keys.iter().zip(&e.values))?),
            ast::Expr::UnaryOp(e) => match e.op {
                ast::UnaryOpKind::Not => ExprKind::Not(self.boxed(&e.expr)?),
                ast::UnaryOpKind::Neg => ExprKind::Neg(self.boxed(&e.expr)?),
            },
            ast::Expr::BinOp(e) => {
                ExprKind::Binary(e.op, Box::new([self.expr(&e.left)?, self.expr(&e.right)?]))
            }
            ast::Expr::Compare(e) => {
                let first = self.boxed(&e.expr)?;
                let others: Result<_, ChatError> =
                    e.ops.iter().map(|op| Ok((op.op, self.expr(&op.expr)?))).collect();
                ExprKind::Compare(first, others?)
            }
            ast::Expr::IfExpr(e) => ExprKind::If {
                test: self.boxed(&e.test_expr)?,
                yes: self.boxed(&e.true_expr)?,
                no: self.optional(e.false_expr.as_ref())?.map(Box::new),
            },
            ast::Expr::GetAttr(e) => ExprKind::Attr(self.boxed(&e.expr)?, e.name.into()),
            ast::Expr::GetItem(e) => {
                ExprKind::Item(Box::new([self.expr(&e.expr)?, self.expr(&e.subscript_expr)?]))
            }
            ast::Expr::Slice(e) => {
                let bounds = [e.start.as_ref(), e.stop.as_ref(), e.step.as_ref()];
                let [start, stop, step] = bounds.map(|bound| self.optional(bound));
                ExprKind::Slice { value: self.boxed(&e.expr)?, bounds: Box::new([start?, stop?, step?]) }
            }
            ast::Expr::Filter(e) => ExprKind::Filter {
                name: e.name.into(),
                value: self.optional(e.expr.as_ref())?.map(Box::new),
                args: self.args(&e.args)?,
            },
            ast::Expr::Test(e) => {
                ExprKind::Test { name: e.name.into(), value: self.boxed(&e.expr)?, args: self.args(&e.args)? }
            }
            ast::Expr::Call(e) => ExprKind::Call(Box::new(self.call(e)?)),
        })
    }

    fn call(&mut self, call: &ast::Call<'_>) -> Result<Call, ChatError> {
        Ok(Call { callee: self.expr(&call.expr)?, args: self.args(&call.args)? })
    }

    fn args(&mut self, args: &[ast::CallArg<'_>]) -> Result<Vec<CallArg>, ChatError> {
        let lower = |arg: &ast::CallArg<'_>| {
            Ok(match arg {
                ast::CallArg::Pos(value) => CallArg::Positional(self.expr(value)?),
                ast::CallArg::Kwarg(name, value) => CallArg::Named((*name).into(), self.expr(value)?),
                ast::CallArg::PosSplat(value) => CallArg::List(self.expr(value)?),
                ast::CallArg::KwargSplat(value) => CallArg::Map(self.expr(value)?),
            })
        };
        args.iter().map(lower).collect()
    }
}

fn constant(value: &minijinja::Value) -> ExprKind {
    if let Some(text) = value.as_str() {
        return ExprKind::Str(text.into());
    }
    match value.kind() {
        ValueKind::Bool => ExprKind::Bool(value.is_true()),
        ValueKind::Number if value.is_integer() => {
            i128::try_from(value.clone()).map_or(ExprKind::None, ExprKind::Int)
        }
        ValueKind::Number => f64::try_from(value.clone()).map_or(ExprKind::None, ExprKind::Float),
        _ => ExprKind::None,
    }
}
