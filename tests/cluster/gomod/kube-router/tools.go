//go:build tools

// Package tools names what is built from this module, so that go.mod and go.sum pin it.
package tools

import (
	_ "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
)
